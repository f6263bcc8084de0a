"""An engine behind an HTTP server: what vLLM and SGLang have in common. How each is asked is in `vllm` and `sglang`.

It knows replies, versions and publishing; a server kind tells it how a request reads and what an event holds.

What holds:
- Every token has an id and a finite logprob that the server sent, and the prompt the server says it was given is the
  one it was sent; else the reply fails.
- A reply's tokens carry the version of the weights that gave them. A policy published as an adapter is served under a
  name of its own: a reply that is running stays on the one it began with, and an old one is unloaded once no reply uses
  it. A policy published as a whole replaces the weights under every reply: so those that run are cut, nothing is on its
  way while the server loads, and each goes on afterwards from its prompt and what it had.
- Logprobs of another distribution than the one that was sampled are refused: the server is probed at the start.

The evidence log holds what came over the wire: the prompt as the server echoed it (else as it was sent), its ids, its
logprobs. It is kept apart from what is handed on and written before a reply's last chunk is.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from polarlike.engines.base import CannotScore, Chunk, EngineError, EngineOptions, GenerateRequest, PolicyWeights
from polarlike.engines.checks import check_sampling, checked_tokens, is_whole_distribution, room_left
from polarlike.engines.log import EngineLog, LogEntry
from polarlike.engines.wire import Broken, Cut, Refused, Stream, Wire, server_url
from polarlike.plugins import nearest
from polarlike.records import Ids, Logprobs, Sampling, UsageError, new_id, no_ids
from polarlike.templates import ChatTemplate, load_template

log = logging.getLogger(__name__)

S = TypeVar("S", bound="Settings")

PROBE_TEMPERATURE = 0.5
PROBE_SPREAD = 0.05
"""Least difference between likely tokens' logprobs, at temperature 1, by which two temperatures can be told apart."""


@dataclass(slots=True)
class Settings:
    """`EngineOptions.extra` of an engine behind a server.

    publish: adapter (a LoRA folder that the server loads beside its model), folder (a whole model folder that it loads
    over its own), or auto (adapter where the policy is one). weights: a folder that this process writes and the server
    reads under the same path; by default a temporary one. timeout_s: most seconds without a byte from the server.
    """

    publish: str = "auto"
    weights: str | None = None
    timeout_s: float = 600.0

    numbers: ClassVar[dict[str, Callable[[Any], Any]]] = {"timeout_s": float}
    """Which of them are numbers, and how each is read."""

    @classmethod
    def of(cls: type[S], extra: Mapping[str, Any], engine: str) -> S:
        """Raises UsageError for a key or value that it does not have."""
        known = [f.name for f in fields(cls)]
        for key in extra:
            if key not in known:
                raise UsageError(f"The {engine} engine has no setting {key!r}{nearest(key, known)}")
        for key, kind in cls.numbers.items():  # YAML 1.1 reads 6e2 as text
            try:
                extra = {**extra, key: kind(extra[key])} if key in extra else extra
            except (TypeError, ValueError):
                raise UsageError(f"The {engine} setting {key} is {extra[key]!r}; it must be a number.") from None
        settings = cls(**extra)
        if not isinstance(settings.weights, str | None):
            raise UsageError(f"The {engine} setting weights is {settings.weights!r}; it must be a folder.")
        if settings.publish not in ("auto", "adapter", "folder"):
            raise UsageError(f"The {engine} setting publish is {settings.publish!r}; use auto, adapter or folder.")
        if not settings.timeout_s > 0:
            raise UsageError(f"The {engine} setting timeout_s is {settings.timeout_s!r}; it must be above 0.")
        return settings


@dataclass(slots=True)
class Piece:
    """What one event of a reply holds, as it was sent. prompt_ids: the server's echo, where the event has one. served:
    the name of the weights, where the event has one."""

    ids: Any
    logprobs: Any
    finish_reason: str | None = None
    prompt_ids: list[int] | None = None
    served: str | None = None


class Reader(ABC):
    """Reads the events of one reply."""

    @abstractmethod
    def read(self, event: dict[str, Any]) -> Piece | None:
        """None for an event that carries nothing of the reply. Raises EngineError on an error event."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request that is at the server, under weights asked for as `served`."""

    served: str
    stream: Stream


@dataclass(slots=True)
class Evidence:
    """What came over the wire for one reply, for the log."""

    request: GenerateRequest
    prompt_ids: list[int] | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, piece: Piece, version: int) -> None:
        if self.prompt_ids is None:
            self.prompt_ids = piece.prompt_ids
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.versions += [version] * len(piece.ids)

    def entry(self, finish_reason: str) -> LogEntry:
        return LogEntry(
            self.request.request_id,
            np.array(self.request.prompt_ids if self.prompt_ids is None else self.prompt_ids, np.int32),
            np.array(self.ids, np.int32),
            np.minimum(np.array(self.logprobs, np.float32), np.float32(0)),
            np.array(self.versions, np.int32),
            finish_reason,
            self.request.sampling.temperature,
        )


class ServedEngine(ABC):
    """An `Engine` over one server. A subclass says how the server is asked."""

    name: ClassVar[str]
    title: ClassVar[str]
    """The server's name in sentences."""
    text_only = False

    def __init__(self, argument: str, options: EngineOptions, settings: Settings):
        if options.model is None:
            raise UsageError(
                f"The {self.title} engine needs the model folder for its tokenizer; name it with --model MODEL_DIR."
            )
        self.template: ChatTemplate | None = load_template(
            options.model, renderer=options.renderer, thinking=options.thinking
        )
        self.model_name = options.model.name
        self.context_length = 0
        self.policy_version = 0
        self.wire = Wire(server_url(argument, self.name), self.title, timeout_s=settings.timeout_s)
        self._settings, self._temperature = settings, options.temperature
        self._log = EngineLog(options.log)
        self._base = ""
        self._served = ""
        self._versions: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._flights: set[Flight] = set()
        self._users: Counter[str] = Counter()
        self._open = asyncio.Event()
        self._refused_unload = False
        self._lock = asyncio.Lock()  # for what must not overlap: publishing and scoring
        self.reports_sampled = True
        self._temporary: Path | None = None
        self._run = new_id("polar")[:14]

    # ------------------------------------------------------------ how a kind of server is asked

    @abstractmethod
    def _body(self, request: GenerateRequest, wire_id: str, prompt: Ids, limit: int, served: str) -> dict[str, Any]:
        """The body of a streamed request for `limit` tokens after `prompt`, every sampling field explicit."""

    @property
    @abstractmethod
    def _path(self) -> str: ...

    @abstractmethod
    def _reader(self, prompt: Ids) -> Reader: ...

    @abstractmethod
    async def _score(self, ids: Ids, start: int, served: str) -> list[Any]:
        """Logprobs of ids[start:] at temperature 1, as the server sent them. Raises CannotScore where it cannot."""

    @abstractmethod
    async def _likely(self, ids: Ids, temperature: float) -> dict[Any, float]:
        """Logprobs of the likeliest next tokens, as a request at that temperature reports them."""

    @abstractmethod
    async def _load_adapter(self, name: str, folder: Path) -> None: ...

    @abstractmethod
    async def _unload_adapter(self, name: str) -> None: ...

    @abstractmethod
    async def _replace_weights(self, folder: Path, version: int) -> None:
        """Loads a model folder over the served weights and forgets what was computed with the old ones."""

    async def _abort(self, wire_id: str) -> None:
        """Tells the server that nobody reads this request any more, where closing its connection does not."""
        return

    _missing_flag: ClassVar[str]
    """What makes the server report the logprobs of what it sampled."""

    _reports_filters: ClassVar[bool] = True
    """Whether those logprobs are also the ones after top-k and top-p."""

    # ------------------------------------------------------------ the engine

    async def start(self) -> None:
        if self._base:
            return
        self.wire.open()
        self._base, self.context_length = await self._describe()
        self._served = self._base
        self._versions[self._base] = self.policy_version
        self.reports_sampled = await self._probe()
        if self._temperature is not None:
            self._check_distribution(Sampling(temperature=self._temperature))
        self._open.set()

    async def close(self) -> None:
        """Unloads what this run loaded; a server that is gone by then has nothing to unload."""
        for name in list(self._folders):
            try:
                await self._unload(name)
            except EngineError:
                break
        await self.wire.close()
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
        await asyncio.to_thread(self._log.close)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Raises EngineError for a prompt or parameters that cannot be served, and for what the server failed at."""
        check_sampling(request.sampling)
        self._check_distribution(request.sampling)
        left = room_left(int(request.prompt_ids.size), self.context_length, request.sampling.max_tokens)
        evidence = Evidence(request)
        pieces, reason, written = [request.prompt_ids], "abort", False
        try:
            for part in count():
                try:
                    prompt = np.concatenate(pieces)
                    async with aclosing(self._fly(request, part, prompt, left, evidence)) as chunks:
                        async for chunk in chunks:
                            pieces.append(chunk.ids)
                            left -= int(chunk.ids.size)
                            if chunk.finish_reason:
                                reason, written = chunk.finish_reason, True
                                await self._write(evidence, reason)
                            yield chunk
                    return
                except Cut:  # by a publish: what is left is sampled under the new weights
                    continue
        except EngineError:
            reason = "error"
            raise
        finally:
            if not written:
                # Shielded: the task that reads may be cancelled, and what was sampled is logged all the same.
                await asyncio.shield(self._write(evidence, reason))

    async def score(self, ids: Ids, start: int, temperature: float) -> Logprobs:
        """float32 [len(ids) - start]; temperature 0 counts as 1. Servers score prompts at temperature 1 alone."""
        if temperature not in (0.0, 1.0):
            raise CannotScore(f"A {self.title} server has the logprobs of given tokens at temperature 1 alone.")
        if not 1 <= start <= ids.size:
            raise EngineError(f"The first token to score is {start} of {ids.size}; it must have a token before it.")
        if start == ids.size:
            return np.zeros(0, np.float32)
        # Alone: a vLLM that takes adapters dies, on the CPU, of prompt logprobs in a batch with other requests.
        async with self._lock, self._alone(cut=False):
            values = await self._score(ids, start, self._served)
        _, scores = checked_tokens(ids[start:].tolist(), values, self.title)
        return scores

    async def publish(self, weights: PolicyWeights, version: int) -> None:
        async with self._lock:
            if version <= self.policy_version:
                raise EngineError(f"Policy version {version} is not above the current one, {self.policy_version}.")
            adapter = weights.save_adapter
            if self._settings.publish == "adapter" and adapter is None:
                raise UsageError("This policy is no LoRA; train one, or set publish to folder in the engine's options.")
            if adapter is None or self._settings.publish == "folder":
                await self._publish_folder(weights, version)
            else:
                name = f"{self._run}-v{version}"
                folder = self._weights_folder() / name
                await asyncio.to_thread(adapter, folder)
                await self._load_adapter(name, folder)
                self._folders[name] = folder
                self._versions[name] = version
                self._served = name
            self.policy_version = version
            await self._unload_unused()

    async def _describe(self) -> tuple[str, int]:
        """The name that the server's own weights are asked for by, and the context's length."""
        answer = await self.wire.get("/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        base = next((m for m in models or [] if not m.get("parent")), None)
        if base is None or not isinstance(base.get("max_model_len"), int):
            raise EngineError(f"The server at {self.wire.url} lists no model with its length; is it {self.title}?")
        return base["id"], base["max_model_len"]

    # ------------------------------------------------------------ one request

    async def _fly(
        self, request: GenerateRequest, part: int, prompt: Ids, limit: int, evidence: Evidence
    ) -> AsyncGenerator[Chunk, None]:
        """One request at the server, sent again once if its connection breaks before the first token."""
        if limit <= 0:
            yield Chunk(no_ids(), np.zeros(0, np.float32), no_ids(), "length")
            return
        for attempt in (0, 1):
            while not self._open.is_set():
                await self._open.wait()
            served = self._served
            wire_id = request.request_id if part == attempt == 0 else f"{request.request_id}-{part}-{attempt}"
            body = self._body(request, wire_id, prompt, limit, served)
            flight = Flight(served, self.wire.stream(self._path, body))
            self._flights.add(flight)
            self._users[served] += 1
            begun = ended = False
            try:
                async with aclosing(self._chunks(flight, prompt, evidence)) as chunks:
                    async for chunk in chunks:
                        begun, ended = True, chunk.finish_reason is not None
                        yield chunk
                return
            except Broken:
                if begun or attempt:
                    raise
            finally:
                self._flights.discard(flight)
                self._users[served] -= 1
                if not ended:
                    await asyncio.shield(self._abort(wire_id))

    async def _chunks(self, flight: Flight, prompt: Ids, evidence: Evidence) -> AsyncGenerator[Chunk, None]:
        reader = self._reader(prompt)
        finished = False
        try:
            async with aclosing(flight.stream.events()) as events:
                async for event in events:
                    # Read on to the end of the body even so: the connection is then kept for the next request.
                    piece = None if finished else reader.read(event)
                    if piece is None:
                        continue
                    if piece.prompt_ids is not None:
                        self._check_echo(piece.prompt_ids, prompt)
                    version = self._version_of(piece, flight)
                    ids, logprobs = checked_tokens(piece.ids, piece.logprobs, self.title)
                    evidence.add(piece, version)
                    reason = self._finish(piece.finish_reason)
                    finished = reason is not None
                    yield Chunk(ids, logprobs, np.full(ids.size, version, np.int32), reason)
        except (Broken, Cut):
            if not finished:
                raise
        if not finished:
            raise Broken(f"The {self.title} server ended a reply without a finish reason; see its log.")

    def _check_echo(self, echo: list[int], prompt: Ids) -> None:
        if not np.array_equal(np.array(echo, np.int64), prompt):
            raise EngineError(
                f"The {self.title} server was given {prompt.size} prompt ids and says that it sampled from {len(echo)} "
                "others; turn off what changes prompts there."
            )

    def _version_of(self, piece: Piece, flight: Flight) -> int:
        served = flight.served if piece.served is None else piece.served
        if served != flight.served:
            raise EngineError(
                f"The {self.title} server was asked for {flight.served} and answered as {served}; name one model there."
            )
        return self._versions[served]

    def _finish(self, reason: str | None) -> str | None:
        if reason is None or reason in ("stop", "length"):
            return reason
        if reason == "abort":
            raise EngineError(f"The {self.title} server aborted the reply; somebody paused it, or it is shutting down.")
        raise EngineError(f"The {self.title} server ended a reply with {reason!r}; see its log.")

    async def _write(self, evidence: Evidence, reason: str) -> None:
        await asyncio.to_thread(self._log.write, evidence.entry(reason))

    # ------------------------------------------------------------ logprobs of what was sampled

    async def _probe(self) -> bool:
        """Whether the server reports the logprobs of the distribution that it samples from. At half the temperature
        two tokens' logprobs are twice as far apart; where they are as far apart as before, temperature was ignored."""
        assert self.template is not None
        ids = self.template.render([{"role": "user", "content": "Name a number, then a colour."}], None)
        try:
            plain, sharp = await self._likely(ids, 1.0), await self._likely(ids, PROBE_TEMPERATURE)
        except (LookupError, TypeError) as e:
            raise EngineError(f"The server at {self.wire.url} sent no logprobs when asked; is it {self.title}?") from e
        both = sorted(set(plain) & set(sharp), key=lambda token: plain[token])
        spread = plain[both[-1]] - plain[both[0]] if both else 0.0
        if spread < PROBE_SPREAD:
            raise EngineError(
                f"The {self.title} server finds its likeliest tokens all alike, so it cannot be told which logprobs "
                "it reports; serve a model that prefers some tokens."
            )
        ratio = (sharp[both[-1]] - sharp[both[0]]) / spread
        return bool(ratio > PROBE_TEMPERATURE**-0.5)

    def _check_distribution(self, sampling: Sampling) -> None:
        if not self.reports_sampled and not is_whole_distribution(sampling):
            raise EngineError(
                f"The {self.title} server reports the logprobs of temperature 1 whatever is sampled, and this run "
                f"samples at {sampling.temperature:g} or with top-p, top-k or penalties; {self._missing_flag}, or "
                "sample at temperature 1 without them."
            )
        if not self._reports_filters and (sampling.top_p < 1 or sampling.top_k):
            raise EngineError(
                f"The {self.title} server reports logprobs from before top-p and top-k; set top_p: 1 and top_k: 0 in "
                "the sampling settings."
            )

    # ------------------------------------------------------------ publishing

    async def _publish_folder(self, weights: PolicyWeights, version: int) -> None:
        folder = self._weights_folder() / f"{self._run}-v{version}"
        try:
            await asyncio.to_thread(weights.save_model, folder)
            async with self._alone(cut=True):
                await self._replace_weights(folder, version)
                self._served = self._base
                self._versions[self._base] = version
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    @asynccontextmanager
    async def _alone(self, *, cut: bool) -> AsyncIterator[None]:
        """No reply of this engine's is at the server meanwhile: those that run are cut, or waited for."""
        self._open.clear()
        try:
            flights = list(self._flights)
            for flight in flights:
                if cut:
                    flight.stream.cut()
            for flight in flights:
                await flight.stream.closed.wait()
            yield
        finally:
            self._open.set()

    async def _unload_unused(self) -> None:
        """What the server keeps is asked for again after the next publish: the new weights are served all the same."""
        for name in [n for n in self._folders if n != self._served and not self._users[n]]:
            try:
                await self._unload(name)
            except EngineError as e:
                if not self._refused_unload:
                    log.warning("the %s server keeps old adapters loaded: %s", self.title, e)
                self._refused_unload = True

    async def _unload(self, name: str) -> None:
        try:
            await self._unload_adapter(name)
        except Refused as e:
            if e.status != 404:  # gone already: the server was restarted
                raise
        await asyncio.to_thread(shutil.rmtree, self._folders.pop(name), ignore_errors=True)

    def _weights_folder(self) -> Path:
        if self._settings.weights is not None:
            folder = Path(self._settings.weights).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="polarlike-weights-"))
        return self._temporary
