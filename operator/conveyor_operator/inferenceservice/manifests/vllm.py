"""How pods that run vLLM differ from others: configuration file, command, variables, probes and shutdown. Pure.

vLLM reads each line of the file as a flag, and `model` as the positional argument.
"""

from typing import Any, Final

from conveyor_api import names
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.manifests.program import PRE_STOP_SECONDS, EngineProgram
from conveyor_operator.loop.owner import Owner

# vLLM returns 503 once its engine process has died. It listens only once it is ready.
_HEALTH_PATH: Final = "/health"

# The model is already on disk, and usage is not reported. A pod's user has no name, but torch asks for one.
_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "LOGNAME": "vllm",
    "VLLM_NO_USAGE_STATS": "1",
}

# vLLM cuts off its answers when it gets SIGTERM. So preStop runs this script, which delays the signal until no request
# is left, or until drain.timeout has passed. A busy vLLM may not answer in time; that is no reason to end. vLLM's port
# is on this machine, so the script uses no proxy.
# With `--disable-log-stats` vLLM does not count requests, so the pod waits for the whole timeout.
_UNTIL_IDLE: Final = """\
import http.client, sys, time, urllib.request
unseen, drain = map(float, sys.argv[1:])
time.sleep(unseen)
end = time.monotonic() + drain
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
while time.monotonic() < end:
    try:
        page = opener.open("http://localhost:{port}/metrics", timeout=5).read().decode()
        counts = [line.split() for line in page.splitlines() if line.startswith("vllm:num_requests_")]
        if counts and not any(float(count[-1]) for count in counts):
            break
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
    time.sleep(0.5)
"""

# vLLM's certificate is for the engines' Service, not for localhost.
_UNVERIFIED: Final = "import ssl\nssl._create_default_https_context = ssl._create_unverified_context\n"


def read_over_tls(script: str) -> str:
    """Return preStop's script for a vLLM that serves TLS."""
    return _UNVERIFIED + script.replace("http://localhost", "https://localhost")


def build_vllm_config(owner: Owner, spec: InferenceServiceSpec, has_ipv6: bool) -> dict[str, Any]:
    """Return the flags of `vllm serve`. A flag with None keeps vLLM's default.

    has_ipv6: whether pods have IPv6 addresses first. vLLM's own default listens on IPv4 alone.
    """
    batching, cache = spec.batching, spec.kv_cache
    return {
        "model": spec.model.source.directory,
        "served-model-name": spec.model.name or owner.name,
        "host": "::" if has_ipv6 else None,
        "port": names.ENGINE_PORT,
        "dtype": spec.engine.dtype.lower(),
        "max-model-len": spec.engine.max_model_len,
        "max-num-seqs": batching.chosen_batch_size,
        "max-num-batched-tokens": batching.max_batch_tokens,
        "gpu-memory-utilization": cache.memory_fraction,
        "num-gpu-blocks-override": cache.block_budget,
        "block-size": cache.block_size if cache.block_budget is not None else None,
        "generation-config": "vllm" if spec.engine.sampling_defaults == "OpenAI" else None,
    }


def build_vllm(spec: InferenceServiceSpec) -> EngineProgram:
    """Return the program of vLLM's pods.

    Before vLLM stops, the pod waits while gateways may still send requests, and then until no request is left.
    """
    script = _UNTIL_IDLE.format(port=names.ENGINE_PORT)
    seconds = [str(PRE_STOP_SECONDS), str(spec.drain.timeout_seconds)]
    return EngineProgram(
        ("vllm", "serve", "--config", names.ENGINE_CONFIG_PATH, *spec.engine.args),
        _HEALTH_PATH,
        _HEALTH_PATH,
        {"exec": {"command": ["python3", "-c", script, *seconds]}},
        _VARIABLES,
    )
