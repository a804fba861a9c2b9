"""Names in the source of a package that is not installed: read out of its wheel and never imported."""

import ast
import zipfile
from functools import cached_property, lru_cache
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DEPTH = 6


class Sources:
    """The modules of one wheel."""

    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)
        self.module = lru_cache(maxsize=None)(self._parse)

    @cached_property
    def _names(self) -> set[str]:
        return set(self._zip.namelist())

    def text(self, module: str) -> str:
        """A module's source; empty where there is no such module."""
        stem = module.replace(".", "/")
        name = next((n for n in (f"{stem}.py", f"{stem}/__init__.py") if n in self._names), None)
        return self._zip.read(name).decode() if name else ""

    def texts(self, package: str) -> str:
        """The source of all modules of a package together."""
        prefix = package.replace(".", "/") + "/"
        names = sorted(n for n in self._names if n.startswith(prefix) and n.endswith(".py"))
        return "\n".join(self._zip.read(name).decode() for name in names)

    def _parse(self, module: str) -> ast.Module:
        return ast.parse(self.text(module))

    def find(self, module: str, name: str, depth: int = _DEPTH) -> tuple[str, ast.AST] | None:
        """Where a name of a module is defined, its imports followed: the module and the node; None if it is not."""
        for node in _statements(self.module(module).body):
            if isinstance(node, Definition) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and depth:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(node.module, alias.name, depth - 1)
        return None

    def members(self, module: str, name: str) -> dict[str, ast.AST]:
        """What a class has, bases of the same wheel included: methods, class attributes, and attributes of ``self``."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        home, node = found
        members: dict[str, ast.AST] = {}
        for base in node.bases:
            for part in ast.walk(base):
                if isinstance(part, ast.Name) and part.id != name:
                    members |= self.members(home, part.id)
        for inner in ast.walk(node):
            if isinstance(inner, Definition) and inner is not node:
                members[inner.name] = inner
            elif isinstance(inner, ast.Assign | ast.AnnAssign):
                # Names without ``self`` are those of the class, or else local variables of a method.
                members |= dict.fromkeys(_targets(inner) if inner in node.body else _of_self(inner), inner)
        return members

    def fields(self, package: str) -> set[str]:
        """The names that classes of a package's modules give a type, as records do with their fields."""
        prefix = package.replace(".", "/") + "/"
        modules = [
            name[:-3].replace("/", ".") for name in self._names if name.startswith(prefix) and name.endswith(".py")
        ]
        classes = [node for name in modules for node in self.module(name).body if isinstance(node, ast.ClassDef)]
        return {n for node in classes for part in node.body if isinstance(part, ast.AnnAssign) for n in _targets(part)}

    def parameters(self, module: str, path: str) -> set[str]:
        """The names of the parameters of a function or, as ``Class.method``, of a method; empty where there is none."""
        owner, _, method = path.partition(".")
        found = self.find(module, owner)
        node = self.members(module, owner).get(method) if method else found and found[1]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return set()
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return {argument.arg for argument in every}


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module, those under ``if`` and ``try`` included."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If):
            found += _statements(node.body) + _statements(node.orelse)
        elif isinstance(node, ast.Try):
            found += _statements(node.body) + [s for handler in node.handlers for s in _statements(handler.body)]
    return found


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names that a statement gives a value or a type."""
    return [part.id for part in _flat(node) if isinstance(part, ast.Name)]


def _of_self(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """The attributes of ``self`` that a statement sets."""
    attributes = [part for part in _flat(node) if isinstance(part, ast.Attribute)]
    return [part.attr for part in attributes if isinstance(part.value, ast.Name) and part.value.id == "self"]


def _flat(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
