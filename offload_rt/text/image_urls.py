"""Images behind http URLs, from public addresses only."""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass

import httpx2

from offload_rt.errors import PromptError

_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_HEADERS = {"Accept": ", ".join(_TYPES), "Accept-Encoding": "identity", "User-Agent": "offload_rt"}
_MAX_REDIRECTS = 3


@dataclass(frozen=True)
class ImageFetcher:
    """Reads images from public addresses.

    A name is resolved once, and the connection goes to the checked address. A second answer of
    the name server has no effect. Proxies of the environment are ignored: they resolve names.

    max_nbytes  size of an image
    """

    max_nbytes: int

    def __call__(self, url: str, timeout_s: float) -> bytes:
        """Read an image within a time, redirects included. Raises PromptError if that fails."""
        return asyncio.run(self._read(url, timeout_s))

    async def _read(self, url: str, timeout_s: float) -> bytes:
        try:
            async with (
                asyncio.timeout(timeout_s),
                httpx2.AsyncClient(trust_env=False, headers=_HEADERS) as client,
            ):
                target = httpx2.URL(url)
                for _ in range(_MAX_REDIRECTS + 1):
                    answer = await self._get(client, target)
                    if isinstance(answer, bytes):
                        return answer
                    target = answer
        except TimeoutError as error:
            raise PromptError(f"{url[:200]}: no image within {timeout_s:.1f} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise PromptError(f"{url[:200]} cannot be read", have=str(error)[:200]) from error
        raise PromptError(f"{url[:200]}: more than {_MAX_REDIRECTS} redirects")

    async def _get(self, client: httpx2.AsyncClient, url: httpx2.URL) -> httpx2.URL | bytes:
        """Return the content of a URL, or the target of its redirect."""
        if url.scheme not in ("http", "https"):
            raise PromptError(f"a redirect to {url.scheme}", need="http or https")
        host = url.raw_host.decode("ascii")
        pinned = url.copy_with(host=await public_address(host))
        headers = {"Host": url.netloc.decode("ascii")}
        names = {"sni_hostname": host}
        async with client.stream("GET", pinned, headers=headers, extensions=names) as response:
            if response.has_redirect_location:
                return url.join(response.headers["Location"])
            if response.status_code != 200:
                raise PromptError(f"{host} answered with status {response.status_code}")
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind not in _TYPES:
                raise PromptError(f"{host} sent {kind[:80]!r}", need=", ".join(_TYPES))
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise PromptError(f"{host} sent a compressed answer", need="an image as it is")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > self.max_nbytes:
                    raise PromptError("the image is too large", need=f"{self.max_nbytes} bytes")
            return bytes(content)


async def public_address(host: str) -> str:
    """Resolve a name. Raises PromptError unless all its addresses are public."""
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PromptError(f"the name {host[:200]} cannot be resolved") from error
    addresses = [str(entry[4][0]) for entry in entries]
    if not all(map(is_public, addresses)):
        change = "send the image as a data URL"
        raise PromptError(f"{host[:200]} is no public address", need="one", change=change)
    return addresses[0]


def is_public(address: str) -> bool:
    """Return whether an address is neither private nor special."""
    given = ipaddress.ip_address(address)
    if isinstance(given, ipaddress.IPv6Address):
        # Tunnels contain IPv4 addresses, which may be private.
        if given.is_site_local or given.sixtofour or given.teredo:
            return False
        given = given.ipv4_mapped or given
    return given.is_global and not (given.is_multicast or given.is_reserved)
