from collections.abc import Iterator
from typing import TypedDict

class Entry(TypedDict):
    question: str
    answer: str
    metadata: dict[str, object]

class ProceduralDataset:
    size: int
    seed: int
    @property
    def category(self) -> str: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Entry]: ...
    def __getitem__(self, idx: int) -> Entry: ...
    def score_answer(self, answer: str | None, entry: Entry) -> float: ...

def create_dataset(
    name: str, *, seed: int | None = ..., size: int = ..., **config: object
) -> ProceduralDataset: ...
