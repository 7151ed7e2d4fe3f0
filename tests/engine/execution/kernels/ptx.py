"""Analyses the main loop of a kernel in its PTX: the order of operations, and which load waits for which."""

import re

_REGISTER = re.compile(r"%[a-z]+\d+")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\s+\[[^]]*\], \[([^]]*)\]")  # the address of its source


def product_loop(ptx: str) -> list[str]:
    """Return the lines of the loop that multiplies matrices."""
    lines = [line.strip() for line in ptx.splitlines()]
    starts = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith("$L__BB")}
    jumps = [(number, re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) for number, line in enumerate(lines)]
    jumps_back = [(starts[jump[1]], number) for number, jump in jumps if jump and starts.get(jump[1], number) < number]
    loops = [lines[start:end] for start, end in jumps_back if any("mma" in line for line in lines[start:end])]
    return max(loops, key=len)  # it may have several jumps back to its beginning


def copies_in_flight(loop: list[str]) -> int:
    """Return how many groups of asynchronous copies to shared memory are still running when the loop waits."""
    return min((int(line.split()[-1].rstrip(";"), 0) for line in loop if "cp.async.wait_group" in line), default=0)


def copied_from_loaded_addresses(loop: list[str]) -> list[str]:
    """Return the asynchronous copies whose address depends on a load of the same iteration."""
    loaded: set[str] = set()  # registers
    found = []
    for line in loop:
        if copy := _COPY.search(line):
            found += [line] if loaded.intersection(_REGISTER.findall(copy[1])) else []
        elif "ld.global" in line:
            loaded.update(_REGISTER.findall(line.split("ld.global")[1].split("[")[0]))
        elif not line.startswith("@"):
            result, _, sources = line.partition(",")
            depends = loaded.intersection(_REGISTER.findall(sources))
            (loaded.update if depends else loaded.difference_update)(_REGISTER.findall(result))
    return found
