"""A stand-in for a worker process that does what each request says: answer, die, hang, or write garbage."""

import json
import os
import sys
import time
from pathlib import Path


def send(kind, value):
    text = json.dumps(value).encode()
    sys.stdout.buffer.write(f"{kind} {len(text)}\n".encode() + text)
    sys.stdout.buffer.flush()


def start():
    """Start as the settings say: log the start, fail always or while a file exists, or wait."""
    settings = json.loads(sys.argv[1])
    if log := settings.get("start_log"):
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
    obstacle = settings.get("fails_while")
    if settings.get("fails_to_start") or (obstacle and Path(obstacle).exists()):
        os._exit(4)
    time.sleep(settings.get("start_seconds", 0.0))
    send("ready", {})


def main():
    start()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        request = message.get("request", {})
        match request.get("do"):
            case "die":
                os._exit(3)
            case "garble":
                sys.stdout.buffer.write(b"what is this\n")
                sys.stdout.buffer.flush()
            case "hang":
                time.sleep(3600)
            case "wait":  # until it is cancelled
                send("progress", {"completed": 1, "total": 2})
                assert json.loads(sys.stdin.buffer.readline()) == {"stop": True}
                send("error", {"error": "stopped"})
            case _ if request:
                send("part", 1)
                send("done", {"pid": os.getpid(), "request": request})


if __name__ == "__main__":
    main()
