"""A stand-in for W&B's network: as much of its GraphQL and its file stream as wandb's client needs to send a run.

It keeps what it got by the protocol's rules: a line of history has an offset, at which it replaces what was there.
"""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HISTORY = "wandb-history.jsonl"
KEY = "0123456789abcdef" * 2 + "01234567"
"""An API key, which the server takes as any other."""


class WandbServer:
    """Serves on a free port of this machine until `close`.

    Attributes:
        runs: by id, each with `history` (lines), `config`, `summary`, `state`, `files` (name to bytes), `exits`.
        refuses: answer each request with this HTTP status, unless 0.
        requests: number of requests so far.
    """

    def __init__(self) -> None:
        self.runs = {}
        self.refuses = 0
        self.requests = 0
        self.lock = threading.Lock()
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                with standin.lock:
                    standin.requests += 1
                    status, answer = standin.answer(self.command, self.path, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer  # noqa: N815 - names of http.server

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that was killed
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def variables(self) -> dict[str, str]:
        """The environment with which wandb's client comes here."""
        return {"WANDB_BASE_URL": self.address, "WANDB_API_KEY": KEY}

    def rows(self, run_id: str) -> list[dict]:
        """The history of a run, without W&B's own fields but the step."""
        lines = [json.loads(line) for line in self.runs[run_id]["history"]]
        return [{key: line[key] for key in line if key == "_step" or not key.startswith("_")} for line in lines]

    def answer(self, method: str, path: str, body: bytes):
        if self.refuses:
            return self.refuses, {"errors": [{"message": "refused by the stand-in"}]}
        if path == "/graphql":
            asked = json.loads(body)
            return 200, {"data": self.graphql(asked.get("operationName"), asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            self.stream(path.split("/")[-2], json.loads(body))
        elif method == "PUT" and path.startswith("/upload/"):
            _, _, run_id, name = path.split("/", 3)
            self.runs[run_id]["files"][name] = body
        return 200, {}

    def graphql(self, operation: str, variables: dict) -> dict:
        name = variables.get("name")
        if operation == "Viewer":
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", "name": "p", "entity": ENTITY, "bucket": self.resumed(name)}}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": self.upserted(name, variables), "inserted": False}}
        if operation == "CreateRunFiles":
            run_id = variables["run"]
            files = [
                {"name": file, "uploadUrl": f"{self.address}/upload/{run_id}/{file}"} for file in variables["files"]
            ]
            return {"createRunFiles": {"runID": run_id, "uploadHeaders": [], "files": files}}
        return {}

    def upserted(self, name: str, variables: dict) -> dict:
        run = self.runs.setdefault(
            name, {"history": [], "config": {}, "summary": {}, "files": {}, "exits": [], "described": []}
        )
        run["described"].append(variables)
        if variables.get("config"):
            run["config"] = {key: entry["value"] for key, entry in json.loads(variables["config"]).items()}
        project = {"id": "p", "name": variables.get("project"), "entity": ENTITY}
        described = {"id": f"b-{name}", "name": name, "displayName": variables.get("displayName"), "description": ""}
        return described | {
            "config": "{}",
            "sweepName": None,
            "project": project,
            "historyLineCount": len(run["history"]),
        }

    def resumed(self, name: str) -> dict | None:
        run = self.runs.get(name)
        if run is None:
            return None
        config = {key: {"value": value} for key, value in run["config"].items()}
        return {
            "id": f"b-{name}",
            "name": name,
            "summaryMetrics": json.dumps(run["summary"]),
            "displayName": name,
            "logLineCount": 0,
            "historyLineCount": len(run["history"]),
            "eventsLineCount": 0,
            # the last line, as a list of lines in JSON
            "historyTail": json.dumps(run["history"][-1:]),
            "eventsTail": "[]",
            "config": json.dumps(config),
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": 1}),
        }

    def stream(self, run_id: str, sent: dict) -> None:
        run = self.runs[run_id]
        for name, part in (sent.get("files") or {}).items():
            if name == HISTORY:
                end = part["offset"] + len(part["content"])
                run["history"][part["offset"] : end] = part["content"]
            elif name == "wandb-summary.json":
                run["summary"] = json.loads(part["content"][-1])
        if sent.get("complete"):
            run["exits"].append(sent.get("exitcode"))


ENTITY = {"id": "e", "name": "me"}
