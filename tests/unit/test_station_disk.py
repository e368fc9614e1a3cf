"""What the station keeps on disk: the spool and the results file, over crashes and full disks."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from outboard_client import BundleResult, Drop, Problem, Result
from outboard_client.answers import Answer, Detection
from outboard_client.station.journal import Journal
from outboard_client.station.spool import OVERHEAD, Entry, Spool, SpoolError

ROOM = 1 << 20
ANSWER = Answer(model="m", task="detection", device="cpu", detections=[Detection("a", 0, 0.5, (1, 2, 3, 4))], meta={"file": "a.jpg"})


def entry(n: int, nbytes: int = 1000) -> Entry:
    return Entry(bytes([n % 256]) * nbytes, 1000 + n, {"n": n}, "flight", f"{n}.jpg")


def spool(folder: Path, limit: int = OVERHEAD + ROOM) -> Spool:
    return Spool(folder, limit)


def test_frames_come_back_in_order_with_all_that_belongs_to_them(tmp_path: Path) -> None:
    kept = spool(tmp_path)
    assert kept.add([entry(1), entry(2)]) and kept.add([entry(3)])
    kept.close()
    kept = spool(tmp_path)
    assert (kept.frames, kept.nbytes) == (3, 3000)
    frames = kept.next(0, 10)
    assert [(f.seq, f.captured, f.meta, f.image) for f in frames] == [(n, 1000 + n, {"n": n}, bytes([n]) * 1000) for n in (1, 2, 3)]
    assert [f.seq for f in kept.next(1, 1)] == [2]
    assert kept.taken("flight") == {"1.jpg", "2.jpg", "3.jpg"} and kept.taken("another") == set()
    kept.close()


def test_what_is_settled_is_gone_and_its_number_is_never_given_again(tmp_path: Path) -> None:
    kept = spool(tmp_path)
    kept.add([entry(1), entry(2)])
    kept.settle(2)
    assert (kept.frames, kept.nbytes, kept.held) == (0, 0, 2)
    kept.close()
    kept = spool(tmp_path)
    kept.add([entry(3)])
    assert [f.seq for f in kept.next(kept.held, 10)] == [3]
    assert kept.taken("flight") == {"1.jpg", "2.jpg", "3.jpg"}, "sent once is taken for good"
    kept.settle(1)
    assert kept.held == 2
    kept.close()


def test_the_limit_is_kept_on_the_disk(tmp_path: Path) -> None:
    kept = spool(tmp_path, OVERHEAD + 8 * ROOM)
    n = 0
    for _ in range(4):  # filled and emptied: space is used again
        while kept.fitting([entry(0, ROOM)]):
            n += 1
            assert kept.add([entry(n, ROOM)])
        assert kept.nbytes == 8 * ROOM and kept.fitting([entry(0, 0), entry(0, 1)]) == 1
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= kept.limit
        kept.settle(n)
    kept.close()
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < ROOM, "an empty spool gives its space back"
    with pytest.raises(SpoolError, match="expected more than"):
        spool(tmp_path, 1000)


def test_a_full_disk_refuses_a_frame_and_keeps_the_others(tmp_path: Path) -> None:
    kept = spool(tmp_path, OVERHEAD + 64 * ROOM)
    kept._db.execute(f"PRAGMA max_page_count={4 * ROOM // (32 << 10)}")  # what SQLite does when write() says ENOSPC, without a disk to fill
    n = 0
    while kept.add([entry(n, ROOM)]):
        n += 1
    assert 1 <= n < 4 and kept.frames == n
    kept.settle(1)
    assert kept.add([entry(99, ROOM // 2)]), "settled frames make room again"
    assert len(kept.next(0, 10)) == n
    kept.close()


def test_a_spool_has_one_user(tmp_path: Path) -> None:
    kept = spool(tmp_path)
    with pytest.raises(SpoolError, match="in use by another station"):
        spool(tmp_path)
    kept.close()
    spool(tmp_path).close()


def test_what_is_no_spool_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool.sqlite").write_bytes(b"this is no database, and long enough to be looked at as one" * 20)
    with pytest.raises(SpoolError, match="not a database"):
        spool(tmp_path)


def test_a_killed_writer_leaves_every_frame_that_add_returned_for(tmp_path: Path) -> None:
    writer = f"""
import itertools, sys
from pathlib import Path
from outboard_client.station.spool import Entry, Spool
spool = Spool(Path({str(tmp_path)!r}), 1 << 30)
for n in itertools.count(1):
    spool.add([Entry(b"%d" % n * 20_000, n, None, "s", str(n))])
    print(n, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", writer], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    time.sleep(0.5)
    promised = 0
    for line in process.stdout:
        promised = int(line)
        if promised >= 30:
            os.kill(process.pid, signal.SIGKILL)
            break
    promised = max([promised, *(int(line) for line in process.stdout)])
    process.wait()
    kept = spool(tmp_path, 1 << 30)
    frames = kept.next(0, 100_000)
    assert [f.seq for f in frames] == list(range(1, len(frames) + 1)) and promised <= len(frames) <= promised + 1
    assert all(f.image == b"%d" % f.seq * 20_000 for f in frames)
    assert kept.taken("s") == {str(f.seq) for f in frames}
    kept.close()


def lines(path: Path) -> list[dict]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_the_results_file_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.ndjson"
    journal = Journal(path)
    assert journal.last == 0
    journal.append(Result(1, ANSWER, 0.0123))
    journal.append(Drop(2, "undecodable", "no image"))
    journal.append(BundleResult(3, {"front": ANSWER, "left": Problem("image_truncated", "cut", status=422)}, ["rear"], math.nan))
    journal.close()
    first, second, third = lines(path)
    assert first["seq"] == 1 and first["type"] == "result" and first["age_ms"] == 12.3 and first["detections"][0]["box"] == [1, 2, 3, 4]
    assert first["meta"] == {"file": "a.jpg"} and "classes" not in first
    assert second == {"type": "drop", "seq": 2, "reason": "undecodable", "detail": "no image"}
    assert third["parts"]["left"]["type"] == "image_truncated" and third["missing"] == ["rear"] and third["age_ms"] is None
    assert Journal(path).last == 3


@pytest.mark.parametrize("cut", [1, 20, 70])
def test_what_a_crash_left_of_a_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.ndjson"
    journal = Journal(path)
    for seq in (1, 2):
        journal.append(Result(seq, ANSWER, 0.5))
    journal.close()
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - cut)
    journal = Journal(path)
    assert journal.last == 1
    journal.append(Drop(2, "failed"))
    journal.close()
    assert [line["seq"] for line in lines(path)] == [1, 2]


def test_lines_of_any_length_are_found(tmp_path: Path) -> None:
    path = tmp_path / "results.ndjson"
    journal = Journal(path)
    for seq in (1, 2):
        journal.append(Drop(seq, "x" * 200_000))
    journal.close()
    with open(path, "ab") as file:
        file.write(b'{"seq": 3, ' + b"y" * 200_000)
    assert Journal(path).last == 2


def test_a_file_that_is_not_this_spools_is_refused(tmp_path: Path) -> None:
    """Its numbers would clear away frames that have no outcome."""
    path = tmp_path / "results.ndjson"
    journal = Journal(path, "spool-a")
    journal.append(Drop(5, "failed"))
    journal.close()
    assert Journal(path, "spool-a").last == 5
    for other in ("spool-b", ""):
        with pytest.raises(ValueError, match="give another file"):
            Journal(path, other)
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(ValueError, match="not one of a station's results"):
        Journal(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "hello\n"
