"""A process that compiles texts by hiprtc. It runs under another C library, so it uses the standard library only.

worker.py LIBHIPRTC INCLUDE-FOLDER < lines of "ARCH TEXT-FILE OUTPUT-FILE"

The answer to a line is a line of JSON, [seconds, log]. The output file is there if the text compiled. LLVM can end a
process: batches of texts therefore compile in processes of their own.
"""

import ctypes
import json
import os
import sys
import time
from itertools import islice

BATCH = 20


def compile_text(hiprtc, include, arch, text_file, output_file):
    """[seconds, log]"""
    with open(text_file, "rb") as file:
        text = file.read()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    hiprtc.hiprtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None)
    options = [f"--offload-arch={arch}", "-std=c++17", f"-I{include}"]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    started = time.perf_counter()
    failed = hiprtc.hiprtcCompileProgram(program, len(options), array)
    seconds = time.perf_counter() - started
    hiprtc.hiprtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(size.value, 1))
    hiprtc.hiprtcGetProgramLog(program, log)
    if not failed:
        hiprtc.hiprtcGetCodeSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        hiprtc.hiprtcGetCode(program, code)
        with open(output_file, "wb") as file:
            file.write(code.raw)
    hiprtc.hiprtcDestroyProgram(ctypes.byref(program))
    return [seconds, log.value.decode(errors="replace")]


def main(library, include):
    """Compile what standard input asks for."""
    os.environ["AMD_COMGR_CACHE"] = "0"
    jobs = (line.split() for line in sys.stdin)
    while batch := list(islice(jobs, BATCH)):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reader)
            hiprtc = ctypes.CDLL(library)
            with os.fdopen(writer, "w") as answers:
                for job in batch:
                    print(json.dumps(compile_text(hiprtc, include, *job)), file=answers, flush=True)
            os._exit(0)
        os.close(writer)
        answered = 0
        with os.fdopen(reader) as answers:
            for line in answers:
                print(line, end="", flush=True)
                answered += 1
        _, status = os.waitpid(child, 0)
        if answered < len(batch):
            print(json.dumps([0.0, f"error: the compiler died with status {status}"]), flush=True)
            jobs = iter([*batch[answered + 1 :], *jobs])


if __name__ == "__main__":
    main(*sys.argv[1:])
