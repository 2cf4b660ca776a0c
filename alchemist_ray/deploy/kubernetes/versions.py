"""Versions that the manifests target. Tests compare them with constraints.txt and the CRDs."""

from alchemist_ray.version import __version__

RAY_VERSION = "2.60.0"  # in the image; KubeRay selects probes and token authentication by it
KUBERAY_VERSION = "1.6.2"
KUBERNETES_VERSIONS = ("1.33", "1.34", "1.35")  # tests check the manifests against their schemas
IMAGE = f"alchemist-on-ray:{__version__}"
