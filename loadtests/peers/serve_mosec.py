"""mosec: a Rust front, Python worker processes. One stage, as many workers as $PROCESSES; the JPEG is the body of POST /inference."""

import os

from mosec import Server, Worker

import work


class Classify(Worker):
    def __init__(self):
        super().__init__()
        self.model = work.open_model()

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> dict:
        return work.classify(self.model, [data])[0]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Classify, num=int(os.environ["PROCESSES"]))
    server.run()
