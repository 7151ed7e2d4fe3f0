"""The stages of the suite, in the order of their importance. Plain data, without torch."""

from dataclasses import dataclass

_TASKS = ("pytest", "PIL", "diffusers", "soundfile", "soxr")
_SERVER = ("fastapi", "httptools", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, which runs in its own process."""

    name: str
    what: str
    function: str  # module:function of this package, called with (Results, Sizes)
    limit_seconds: float = 480.0
    needs: tuple[str, ...] = ()  # modules that only this stage needs; without them it is skipped
    interprets: bool = False  # a rehearsal runs it in Triton's interpreter


STAGES = {
    stage.name: stage
    for stage in (
        Stage("tests", "the tests marked `gpu`", "gpu_tests:run", needs=("pytest", "PIL")),
        Stage("kernels", "each kernel's time and share of the device's limits", "kernels:run", interprets=True),
        Stage("weights", "products of weights in 4 and 8 bits", "weights:run", interprets=True),
        Stage("nano", "nano-vllm's bench", "throughput:run_nano"),
        Stage("one", "one request at a time, at both shapes", "throughput:run_one"),
        Stage("prompts", "first tokens, and prompts beside decodes, at both shapes", "prompts:run"),
        Stage("profile", "20 steps under torch's profiler, with the gaps", "trace:run"),
        Stage("burst8b", "many requests at once, at the large shape", "throughput:run_burst"),
        Stage("generate-batch", "transformers' generate_batch on the requests of nano", "peer:run"),
        Stage("curve", "a decode step by its number of rows, of several models", "curve:run"),
        Stage("products", "matrix products by their number of rows", "products:run", interprets=True),
        Stage("cores", "nano-vllm's bench on few CPU cores", "cores:run"),
        Stage("nano-vllm", "nano-vllm itself, if it is installed", "nano_vllm:run"),
        Stage("http", "a burst of streams through HTTP", "streams:run", needs=_SERVER),
        Stage("tasks", "the tests of other tasks, on the GPU", "gpu_tests:run_tasks", needs=_TASKS),
    )
}
