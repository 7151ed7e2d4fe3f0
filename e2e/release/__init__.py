"""Publishes a release to a registry on this machine, as `.github/workflows/release.yaml` does to a public one.

`python -m e2e.release` publishes the images of `make images`, and the chart that names them by digest. All are signed.
"""
