"""Services below a guest of ring3, in Python: see docs/tracing.md.

    import ring3_trace
    with ring3_trace.connect("web", events=["syscall:openat"], filter="ret >= 0") as service:
        for event in service:
            print(event["comm"], event["arguments"])

With ring=1 << 22 events come by so many bytes of memory that both share, which is cheaper.
With stops="entry" a vCPU stands at each event until service.go(event) or service.reply(event, value).
"""

import json
import mmap
import os
import socket
import struct


class Problem(Exception):
    """The machine does not do what was asked."""


def _folder():
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(runtime, "ring3") if runtime else f"/tmp/ring3-{os.getuid()}"


def _find(machine):
    folder = _folder()
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if not name.endswith(".sock"):
            continue
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(os.path.join(folder, name))
            connection.sendall(b'{"command":"status"}\n')
            reader = connection.makefile("r", encoding="utf-8")
            status = json.loads(reader.readline())
        except (OSError, ValueError):
            connection.close()
            continue
        if machine in (status["name"], str(status["pid"])):
            return connection, reader
        reader.close()
        connection.close()
    raise Problem(f"no machine is called {machine}")


def connect(machine, events=(), **request):
    """Connects to a machine. Further arguments: comm, pid, filter, wait, ring, stops, registers, memory."""
    return Service(machine, dict(request, events=list(events)))


class _Ring:
    """Events in memory that a machine shares: app/ring3_trace/src/ring.rs says what is where."""

    EVENTS, FILLS, NO_TIME, NO_RESULT = 4096, 1 << 31, (1 << 64) - 1, 0xFFFF

    def __init__(self, descriptor):
        with os.fdopen(descriptor, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._size, self._read = len(self._memory) - self.EVENTS, 0

    def close(self):
        self._memory.close()

    def _number(self, at):
        return struct.unpack_from("<Q", self._memory, at)[0]

    def lost(self):
        return self._number(128)

    def may_sleep(self):
        struct.pack_into("<I", self._memory, 256, 1)
        is_empty = self._number(64) == self._read
        if not is_empty:
            struct.pack_into("<I", self._memory, 256, 0)
        return is_empty

    def take(self):
        """The next event; None if there is none."""
        while self._number(64) != self._read:
            at = self.EVENTS + self._read % self._size
            (length,) = struct.unpack_from("<I", self._memory, at)
            event = None if length & self.FILLS else self._event(at)
            self._read += length & ~self.FILLS
            struct.pack_into("<Q", self._memory, 192, self._read)
            if event is not None:
                return event
        return None

    def _event(self, at):
        head = struct.unpack_from("<IHHQQIIIHHII", self._memory, at)
        _, kind, name, ns, took, pid, tid, vcpu, comm, result, arguments, _ = head
        event = {"ns": ns, "pid": pid, "tid": tid, "vcpu": vcpu}
        if took != self.NO_TIME:
            event["took"] = took
        at += struct.calcsize("<IHHQQIIIHHII")
        texts = {"kind": kind, "name": name, "comm": comm, "result": result, "arguments": arguments}
        for key, length in texts.items():
            missing = key == "result" and length == self.NO_RESULT
            length = 0 if missing else length
            if not missing:
                event[key] = self._memory[at : at + length].decode(errors="replace")
            at += length + 1
        return event


class Service:
    """A connection: iterate over it for events."""

    def __init__(self, machine, request):
        self._connection, self._reader = _find(machine)
        self._waiting, self._lost, self._ring, self._first = [], 0, None, ""
        self._send({"command": "trace"})
        self._reader.readline()
        self._send(request)
        if request.get("ring") is not None:
            byte, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
            self._first = byte.decode()
            self._ring = _Ring(descriptors[0]) if descriptors else None
        first = self._receive()
        if first is None or "started" not in first:
            raise Problem((first or {}).get("error", "the machine has ended"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Leaves; vCPUs that stand go on."""
        self._reader.close()
        self._connection.close()
        if self._ring is not None:
            self._ring.close()

    @property
    def lost(self):
        """Events that were lost so far."""
        return self._lost + (0 if self._ring is None else self._ring.lost())

    def _send(self, *objects):
        self._connection.sendall("".join(json.dumps(each) + "\n" for each in objects).encode())

    def _receive(self):
        line, self._first = self._first + self._reader.readline(), ""
        return json.loads(line) if line.endswith("\n") else None

    def __iter__(self):
        while True:
            event = None if self._ring is None else self._ring.take()
            if event is not None:
                yield event
                continue
            if self._ring is not None and not self._waiting and not self._ring.may_sleep():
                continue
            line = self._waiting.pop(0) if self._waiting else self._receive()
            if line is None:
                while self._ring is not None and (event := self._ring.take()) is not None:
                    yield event
                return
            if line == "wake":
                continue
            if "error" in line:
                raise Problem(line["error"])
            self._lost += line.get("lost", 0)
            if "event" in line:
                yield line["event"]

    def order(self, order, /, **what):
        """Has the machine do something; returns its answer."""
        self._send({order: {key: value for key, value in what.items() if value is not None}})
        while (line := self._receive()) is not None:
            if "answer" not in line:
                self._waiting.append(line)
                continue
            answer = line["answer"]
            if answer == "done":
                return None
            ((kind, value),) = answer.items()
            if kind == "refused":
                raise Problem(value)
            return bytes.fromhex(value) if kind == "bytes" else value
        raise Problem("the machine has ended")

    def go(self, event):
        """The vCPU goes on."""
        self.order("go", vcpu=event["vcpu"])

    def reply(self, event, value):
        """The function is not executed: it returns this."""
        self.order("reply", vcpu=event["vcpu"], value=value)
        self.go(event)

    def read(self, gva, length, vcpu=None):
        """Guest memory."""
        return self.order("read", vcpu=vcpu, gva=gva, len=length)

    def write(self, gva, data, vcpu=None):
        """Changes guest memory."""
        self.order("write", vcpu=vcpu, gva=gva, bytes=data.hex())

    def registers(self, event):
        """Registers of the vCPU that stands."""
        return self.order("registers", vcpu=event["vcpu"])

    def set(self, event, **registers):
        """Changes registers of the vCPU that stands."""
        self.order("set", vcpu=event["vcpu"], registers=registers)

    def argument(self, event, number, value):
        """Changes an argument of the system call at whose entry the vCPU stands."""
        self.order("argument", vcpu=event["vcpu"], number=number, value=value)

    def move(self, place, other):
        """A place of `break:` at which vCPUs stand is another one from now on."""
        return self.order("move", **{"from": place, "to": other})

    def symbol(self, name):
        """Where a symbol of the kernel is."""
        return self.order("symbol", name=name)
