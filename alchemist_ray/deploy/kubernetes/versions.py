"""What the manifests are made for. Tests compare these with constraints.txt and the CRDs' copy."""

from alchemist_ray import __version__

RAY_VERSION = "2.60.0"  # of the image; KubeRay chooses probes and checks token auth by it
KUBERAY_VERSION = "1.6.2"
KUBERNETES_VERSIONS = ("1.33", "1.34", "1.35")  # whose schemas the manifests are checked against
IMAGE = f"alchemist-on-ray:{__version__}"
