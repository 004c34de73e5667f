"""Ranks as processes, for the checks that start their own: one that fails ends the others, which would wait for it."""
import subprocess
import sys
import time

# Seconds that the others get after the first failure. Often they fail too, and what they say of it belongs into the log.
GRACE = 5


def ended(code):
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def run(commands, env, limit):
    """Runs a command per rank to its end; exits with the ranks that failed, in the order in which they did."""
    ranks = {rank: subprocess.Popen(command, env=env) for rank, command in enumerate(commands)}
    failed, late = [], "seconds"
    end = time.monotonic() + limit
    try:
        while ranks and time.monotonic() < end:
            for rank, process in list(ranks.items()):
                if process.poll() is None:
                    continue
                del ranks[rank]
                if process.returncode != 0:
                    failed.append(f"rank {rank} failed with {ended(process.returncode)}")
                    if len(failed) == 1:
                        end, late = min(end, time.monotonic() + GRACE), "seconds after the first failure"
            time.sleep(0.02)
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()
    if ranks:
        numbers = ", ".join(map(str, ranks))
        failed.append(f"ranks not done {GRACE if failed else limit} {late}: {numbers}")
    if failed:
        sys.exit("; ".join(failed))
