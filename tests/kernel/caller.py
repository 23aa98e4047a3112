"""The process under test: opens libraries and calls into them as JSON lines on stdin say."""

import ctypes
import json
import mmap
import os
import queue
import sys
import threading
from pathlib import Path


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


libraries = []
kept = []


def find(name):
    for library in libraries:
        try:
            return getattr(library, name)
        except AttributeError:
            continue
    raise SystemExit(f"no library has {name}")


def value_of(argument):
    if isinstance(argument, str):
        return Id((ctypes.c_ubyte * 128)(*bytes.fromhex(argument)))
    return ctypes.c_uint64(argument & (1 << 64) - 1)


def call(command):
    function = find(command["call"])
    function.restype = ctypes.c_long
    values = [value_of(argument) for argument in command["arguments"]]
    result = 0
    for _ in range(command["times"]):
        result = function(*values)
    return result


class Worker:
    def __init__(self):
        self.work, self.done = queue.Queue(), queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            self.done.put(call(self.work.get()))


workers = {}


def handle(command):
    if "call" in command:
        if not command["thread"]:
            return call(command)
        worker = workers.setdefault(command["thread"], Worker())
        worker.work.put(command)
        return worker.done.get()
    if "memory" in command:
        block = ctypes.create_string_buffer(bytes.fromhex(command["memory"]) or b"\0")
        kept.append(block)
        return ctypes.addressof(block)
    if "peek" in command:
        return ctypes.string_at(*command["peek"]).hex()
    if "address" in command:
        return ctypes.cast(find(command["address"]), ctypes.c_void_p).value
    if "set" in command:
        name, value = command["set"]
        for library in libraries:
            ctypes.c_uint64.in_dll(library, name).value = value
        return 0
    if "open" in command:
        libraries.append(ctypes.CDLL(command["open"]))
        return 0
    if "map" in command:
        with Path(command["map"]).open("rb") as file:
            kept.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ))
        return 0
    return os.getpid()


for path in sys.argv[1:]:
    libraries.append(ctypes.CDLL(path))
for line in sys.stdin:
    print(json.dumps(handle(json.loads(line))), flush=True)
