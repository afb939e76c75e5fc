"""A fake of Ray: actors with answers set by the test, and a head that may be unreachable."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Actor:
    """An actor whose answers the test sets. An exception is raised; None means no answer yet."""

    def __init__(self, options: dict[str, Any], args: tuple[Any, ...]) -> None:
        self.options, self.args = options, args
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Return a remote method. A call of it is a question for `FakeRay.get`."""

        def remote(*args: Any) -> tuple[Actor, str, tuple[Any, ...]]:
            self.asked.append(name)
            return self, name, args

        return SimpleNamespace(remote=remote)

    def answer(self, name: str, *args: Any) -> Any:
        return self.answers[name]


class FakeRay:
    """The used part of the module `ray`. `away`: the head is unreachable; `silent`: no actor answers."""

    exceptions = SimpleNamespace(RayError=RayError, ActorDiedError=ActorDiedError, RayTaskError=RayTaskError)
    util: Any = SimpleNamespace(placement_group_table=dict)  # no groups

    def __init__(self, actor_type: type[Actor] = Actor) -> None:
        self.away = self.silent = self.shut = False
        self.actors: dict[str, Any] = {}
        self.made: list[Any] = []
        self.killed: list[str] = []
        self.on_kill: Callable[[], None] = lambda: None
        self._actor_type = actor_type

    def head(self) -> None:
        """Raise the error of an unreachable head."""
        if self.away:
            raise ConnectionError("the head is away")

    def remote(self, actor: Any) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *args: self.make(options, args)))

    def make(self, options: dict[str, Any], args: tuple[Any, ...]) -> Actor:
        self.head()
        if options["name"] in self.actors:
            raise ValueError(f"the name {options['name']} is taken")
        self.made.append(self._actor_type(options, args))
        self.actors[options["name"]] = self.made[-1]
        return self.actors[options["name"]]

    def get_actor(self, name: str, namespace: str) -> Any:
        assert namespace == "baton-test"
        if name not in self.actors:
            raise ValueError("no such actor")
        return self.actors[name]

    def get(self, question: tuple[Actor, str, tuple[Any, ...]], timeout: float | None = None) -> Any:
        actor, name, args = question
        said = RayError("it does not answer") if self.silent else actor.answer(name, *args)
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self, actor: Actor, no_restart: bool) -> None:
        self.head()
        assert no_restart
        self.killed.append(actor.options["name"])
        self.on_kill()
        self.actors.pop(actor.options["name"], None)
        actor.answers = dict.fromkeys(actor.answers, ActorDiedError("killed"))

    def shutdown(self) -> None:
        self.shut = True
