"""Print LINES lines of 80 bytes in each of WORKERS processes: HOW WORKERS LINES.

HOW is ``plain`` (programs whose stdout is a file), ``line-buffered`` (programs that write each line into a pipe, which
``cat`` copies into a file), ``shown`` or ``hidden`` (ranks of distrain, on the console or in their log files only).
"""

import os
import resource
import subprocess
import sys

import benchmark_tasks


def print_lines(lines: int) -> None:
    text = "x" * 73
    for number in range(lines):
        print(f"{number % 100_000:5} {text}")


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_programs(how: str, workers: int, lines: int) -> None:
    folder = os.environ["BENCHMARK_OUT"]
    command = [sys.executable, __file__, "program", how, str(lines)]
    started = []
    for number in range(workers):
        with open(f"{folder}/{number}.log", "wb") as file:
            if how == "plain":
                started.append(subprocess.Popen(command, stdout=file))
                continue
            program = subprocess.Popen(command, stdout=subprocess.PIPE)
            started += [program, subprocess.Popen(["cat"], stdin=program.stdout, stdout=file)]
            program.stdout.close()
    for process in started:
        process.wait()


def run_ranks(how: str, workers: int, lines: int) -> None:
    import distrain

    def train() -> None:
        print_lines(lines)
        benchmark_tasks.write(f"worker_{distrain.get_context().get_world_rank()}", cpu_s())

    config = distrain.LoggingConfig(ranks=None if how == "shown" else [])
    distrain.DataParallelTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=workers),
        run_config=distrain.RunConfig(storage_path=os.environ["BENCHMARK_OUT"] + "/runs", logging_config=config),
    ).fit()
    benchmark_tasks.write("user", cpu_s())


def main() -> None:
    how, workers, lines = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if how == "program":
        if workers == "line-buffered":
            sys.stdout.reconfigure(line_buffering=True)
        print_lines(lines)
    elif how in ("shown", "hidden"):
        run_ranks(how, int(workers), lines)
    else:
        run_programs(how, int(workers), lines)


if __name__ == "__main__":
    main()
