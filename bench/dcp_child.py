"""Child process with torch: save a state with its own checkpoint, make it durable, print GB/s and CPU seconds a GB.

    python bench/dcp_child.py FOLDER BYTES THREADS ROUNDS

With the three flushes that it leaves out (its metadata, the folder, the parent): like is compared with like.
"""

import json
import os
import shutil
import sys
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp


def flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main(folder: str, size: int, threads: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    count = 24
    state = {f"w{index}": torch.rand(size // 4 // count) for index in range(count)}
    rates, cpu = [], []
    for number in range(rounds + 1):
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=threads), no_dist=True)
        for path in (f"{folder}/.metadata", folder, f"{folder}/.."):
            flush(path)
        if number:
            rates.append(size / 1e9 / (time.perf_counter() - began_s))
            cpu.append((time.process_time() - cpu_s) / (size / 1e9))
    print(json.dumps([rates, cpu]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
