# The server (EXTRAS=server,torch,otel, 7 GB) or the load generator (EXTRAS=load, small), by the build argument.
#   docker build -t outboard .
FROM python:3.11-slim

ARG EXTRAS=server,torch,otel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# torch.compile builds its CPU kernels with g++ and its CUDA launchers with gcc.
RUN case ",$EXTRAS," in *,torch,*) apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* ;; esac

WORKDIR /app
# The dependencies first, with an empty project: they change seldom and weigh gigabytes, the code changes often and weighs little.
COPY pyproject.toml constraints.txt README.md ./
RUN mkdir server clients && pip install --constraint constraints.txt ".[$EXTRAS]"
COPY server server
COPY clients clients
RUN pip install --no-deps --force-reinstall .
COPY models models
COPY loadtests loadtests

# Whatever is written (fetched packages, compiled models, measurements) goes to /cache; the rest may be read-only.
# Open to every user, since the compose file can run it as another than 1000.
RUN useradd --uid 1000 --create-home outboard && install -d -m 1777 /cache
ENV XDG_CACHE_HOME=/cache OUTBOARD_CACHE=/cache/outboard
VOLUME /cache
USER outboard

EXPOSE 8000
CMD ["outboard", "serve", "--models", "/app/models", "--host", "0.0.0.0", "--port", "8000"]
