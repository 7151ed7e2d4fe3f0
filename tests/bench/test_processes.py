"""Processes that measurements start."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from conveyor_bench.processes import end, end_in_order, start

end_in_order()
process = start([sys.executable, "-c", "import time; time.sleep(60)"], {}, Path(sys.argv[1]))
try:
    print(process.pid, flush=True)
    process.wait()
finally:
    end(process)
"""


def test_a_measurement_that_is_stopped_ends_what_it_has_started(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        pid = int(measurement.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        measurement.terminate()
        assert measurement.wait(60) == 128 + 15
    assert not Path(f"/proc/{pid}").exists()
