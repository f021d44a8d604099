#!/usr/bin/env python3
"""Records which files programs of a guest open, and how: file_recorder.py MACHINE [FILTER]"""

import sys

import ring3_trace

CALLS = ["open", "openat", "creat", "execve", "unlinkat", "unlink", "renameat2", "rename"]


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("file_recorder.py MACHINE [FILTER]")
    events = [f"syscall:{call}" for call in CALLS]
    with ring3_trace.connect(sys.argv[1], events, filter=sys.argv[2] if sys.argv[2:] else None, ring=1 << 20) as service:
        print("records", flush=True)
        for event in service:
            result = event.get("result", "?")
            print(f"{event['comm']} {event['name']}({event['arguments']}) = {result}", flush=True)
        if service.lost:
            print(f"{service.lost} events were lost", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except ring3_trace.Problem as problem:
        sys.exit(f"file_recorder.py: {problem}")
