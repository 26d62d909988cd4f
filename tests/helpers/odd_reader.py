"""A reader whose bodies say what it does, for tests of the processes that read."""

import os
import sys
import time
import zlib

from mtpjax.serving.api.reading_result import Reading


class OddReader:
    """Does what the kind says. The result tells the process, whether JAX is in it, and the body's checksum."""

    def read(self, kind, raw):
        if kind == "sleep":
            time.sleep(float(raw))
        elif kind == "compute":
            while True:
                sum(range(1000))
        elif kind == "memory":
            bytearray(int(raw))
        elif kind == "fail":
            raise KeyError("odd")
        elif kind == "exit":
            os._exit(int(raw))
        elif kind == "print":
            print("not an answer", flush=True)
        return Reading({"pid": os.getpid(), "has_jax": "jax" in sys.modules, "checksum": zlib.crc32(raw)})
