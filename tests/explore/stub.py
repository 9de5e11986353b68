"""Stands in for a process that computes: does what the request says, so that its end can be tried in every way."""

import json
import os
import sys
import time


def send(kind, value):
    text = json.dumps(value).encode()
    sys.stdout.buffer.write(f"{kind} {len(text)}\n".encode() + text)
    sys.stdout.buffer.flush()


def main():
    for line in sys.stdin.buffer:
        told = json.loads(line)
        ask = told.get("ask", {})
        match ask.get("do"):
            case "die":
                os._exit(3)
            case "garble":
                sys.stdout.buffer.write(b"what is this\n")
                sys.stdout.buffer.flush()
            case "hang":
                time.sleep(3600)
            case "wait":  # until it is told to stop
                send("progress", {"done": 1, "of": 2})
                assert json.loads(sys.stdin.buffer.readline()) == {"stop": True}
                send("error", {"error": "stopped"})
            case _ if ask:
                send("part", 1)
                send("done", {"pid": os.getpid(), "got": ask})


if __name__ == "__main__":
    main()
