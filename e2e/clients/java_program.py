"""Builds the programs with the clients for Java, once for each set of versions. Used by `scripted`."""

import hashlib
import shutil
from pathlib import Path
from typing import Final

from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

MODULES: Final = {
    "openai": ("com.openai:openai-java:4.0.0",),
    "spring": ("org.springframework.ai:spring-ai-openai:1.1.0", "org.springframework.ai:spring-ai-client-chat:1.1.0"),
    "langchain4j": ("dev.langchain4j:langchain4j-open-ai:1.8.0", "dev.langchain4j:langchain4j:1.8.0"),
}
_SOURCES: Final = sorted((Path(__file__).parent / "programs").glob("*.java"))


def build_java() -> Path:
    """Return the folder with `classes` and the libraries in `lib`. Maven keeps its downloads in its own cache."""
    modules = [module for row in MODULES.values() for module in row]
    key = hashlib.sha256(b"".join(each.read_bytes() for each in _SOURCES) + repr(modules).encode()).hexdigest()[:8]
    folder = CACHE / "clients" / f"java-{key}"
    if (folder / "classes").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "pom.xml").write_text(_pom(modules))
    with announced("building the clients for Java"):
        programs.run(
            "mvn", "--quiet", "--batch-mode", "dependency:copy-dependencies", "-DoutputDirectory=lib",
            cwd=folder, check=True,
        )  # fmt: skip
        programs.run("javac", "-parameters", "-cp", "lib/*", "-d", "classes", *_SOURCES, cwd=folder, check=True)
    return folder


def _pom(modules: list[str]) -> str:
    keys = ("groupId", "artifactId", "version")
    own = "".join(f"<{key}>clients</{key}>" for key in keys)
    listed = [zip(keys, module.split(":"), strict=True) for module in modules]
    needed = "".join(
        f"<dependency>{''.join(f'<{key}>{value}</{key}>' for key, value in each)}</dependency>" for each in listed
    )
    return (
        f'<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>{own}'
        f"<dependencies>{needed}</dependencies></project>"
    )
