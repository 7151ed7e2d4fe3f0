"""Tests compiling the CPU kernels: what is compiled, and the messages for a missing or failing compiler."""

import platform
import runpy
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[4] / "engine" / "native"
compile_script = runpy.run_path(str(NATIVE / "compile.py"))
CompileError, compile_library = compile_script["CompileError"], compile_script["compile_library"]


def test_a_missing_compiler_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    with pytest.raises(CompileError, match=r"cannot run the C compiler '/no/such/cc'.*install one or set CC"):
        compile_library(tmp_path / "libconveyor.so")
    assert not list(tmp_path.iterdir())


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'the disk is full' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(CompileError, match="the disk is full"):
        compile_library(tmp_path / "out" / "libconveyor.so")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instruction sets are x86's")
@pytest.mark.parametrize(
    "refuses",
    [
        pytest.param('case "$*" in *-mamx-tile*) exit 1 ;; esac', id="compiler"),
        pytest.param('for i; do case $i in *.c) ! grep tilerelease "$i" || exit 1 ;; esac; done', id="assembler"),
    ],
)
def test_an_instruction_set_that_is_not_known_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(
        f"""#!/bin/sh
        echo "$@" >> {calls}
        [ "$1" = -dumpmachine ] && echo x86_64-linux-gnu
        {refuses}
        while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done; true\n"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    compile_library(tmp_path / "out" / "libconveyor.so")
    assert {"-DCV_ISA=avx512bf16", "-DCV_HAVE_AVX512BF16"} <= {*calls.read_text().split()}
    assert not {"-DCV_ISA=amx", "-DCV_HAVE_AMX"} & {*calls.read_text().split()}


def test_no_flag_ties_the_library_to_this_machine_or_changes_what_nan_means() -> None:
    flags = {*compile_script["COMMON_FLAGS"], *sum(compile_script["_X86_FLAGS"].values(), ())}
    assert not flags & {"-march=native", "-mtune=native", "-ffast-math", "-Ofast"}


def test_every_kernel_file_is_compiled() -> None:
    files = {path.stem for path in (NATIVE / "src").glob("*.c")}
    assert files == {*compile_script["_KERNELS"], *compile_script["_ONCE"]}
