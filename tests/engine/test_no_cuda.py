"""torch without CUDA's libraries, as `make try` and the local clusters' image have it on machines without a GPU."""

import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "engine" / "no_cuda.py"
CODE = """
import torch
assert torch.ones(2, 3) @ torch.ones(3, 1) is not None
assert torch.linalg.inv(torch.eye(3)).sum() == 3
with torch.profiler.profile() as profile:
    torch.ones(3).add(1)
loaded = {line.rpartition("/")[2].partition(".")[0] for line in open("/proc/self/maps") if "/nvidia/" in line}
print(torch.cuda.is_available(), sorted(loaded))
"""


def test_each_package_that_is_left_out_or_kept_is_in_the_lock() -> None:
    module = runpy.run_path(str(SCRIPT))
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    names = {package["name"] for package in packages}
    left_out = set(module["find_packages"](ROOT / "uv.lock"))
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= left_out <= names
    assert set(module["KEPT"]) <= names - left_out
    (torch,) = (package for package in packages if package["name"] == "torch")
    assert {"numpy", "triton"}.isdisjoint(left_out)
    assert left_out & {each["name"] for each in torch["dependencies"]}


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or Path("/dev/nvidiactl").exists() or not all(map(shutil.which, ("cc", "nm", "readelf"))),
    reason="needs Linux without a GPU, a C compiler and binutils",
)
def test_torch_computes_without_cuda_s_libraries(tmp_path: Path) -> None:
    """They are missing in a copy of torch, which is made of hard links."""
    spec = find_spec("torch")
    assert spec
    assert spec.origin
    installed = Path(spec.origin).parent.parent
    site = tmp_path / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    done = subprocess.run(["cp", "--archive", "--link", installed / "torch", site], capture_output=True)
    if done.returncode:
        pytest.skip("the temporary folder is on another file system")
    for name in ("cudart", "cupti"):
        for library in installed.glob(f"nvidia/*/lib/lib{name}.so.*"):
            (site / library.relative_to(installed)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, site / library.relative_to(installed))
    subprocess.run([sys.executable, SCRIPT, "fill", tmp_path], check=True)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={"PYTHONPATH": str(site), "PATH": ""}, capture_output=True, text=True
    )
    assert done.stdout == "False ['libcudart', 'libcupti']\n", done.stderr
