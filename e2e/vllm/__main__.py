"""`python -m e2e.vllm`: brings vLLM's image to the node of KUBECONFIG's cluster. Called by `make vllm`."""

from e2e import kube, vllm
from e2e.cluster import load, local, provider
from e2e.cluster.lock import exclusive


def main() -> None:
    bring = load.bring_to_local if provider.of_kubeconfig() is local else load.bring_to_kind
    with kube.errors_in_words(), exclusive():
        bring(vllm.IMAGE, vllm.DOCKERFILE)


if __name__ == "__main__":
    main()
