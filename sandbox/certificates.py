"""Extra certificate authorities of the host, for builds and boxes that use a network.

Some networks re-sign HTTPS with a certificate of their own, which the host was told to trust. Package managers in a
container must be told too. Where the host has no extra certificates nothing here does anything.
"""

from __future__ import annotations

from pathlib import Path

LOCAL = Path("/usr/local/share/ca-certificates")
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
INSIDE = "/etc/polarlike-ca.crt"
VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")


def bundle() -> Path | None:
    """The host's whole certificate bundle, if the host trusts more than its distribution does."""
    extra = LOCAL.is_dir() and any(LOCAL.rglob("*.crt"))
    return BUNDLE if extra and BUNDLE.exists() else None


def variables() -> dict[str, str]:
    """What points the usual tools at the bundle inside a container."""
    return dict.fromkeys(VARIABLES, INSIDE)
