"""A second decoder, written from docs/FORMAT.md alone, to be read next to it: slow and plain, from outside to inside.
What that page says must hold is asserted; time and memory are not guarded against hostile bytes. bfloat16 is float32.
"""

import hashlib
import io
import itertools
import math
import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
DTYPES = [np.dtype(n) for n in ("f4", "f8", "f2", "f4", "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]


def decode(payload: bytes, like: Arrays | None = None, drift: Arrays | None = None) -> Arrays:
    """The tensors of a payload. `like` is the model, `drift` current - initial model for a shared basis."""
    reader = Reader(payload)
    start, flags, checksum = struct.unpack("<3sBI", reader.take(8))
    assert start == b"FQ\1" and flags < 64 and checksum == zlib.crc32(payload[:4] + payload[8:])
    gain, basis = reader.scale() if flags & 4 else 1.0, reader.take(8) if flags & 8 else None
    layout = reader.layout(bool(flags & 1), like)
    moves = read_basis(layout, drift or {}, basis) if basis else {}
    unit, shifts = math.nan, np.zeros(16)
    if flags & 2:
        unit, (first, last) = gain * reader.scale(), divmod(reader.byte(), 16)
        shifts[first : last + 1] = np.frombuffer(reader.take(max(0, last + 1 - first)), np.int8) / 256
    sections = Sections(reader, gain, unit, shifts, moves)
    values = sections.small([t for t in layout if t.size <= 1024]) if flags & 16 else {}
    values |= {t.name: sections.section(t) for t in layout if t.name not in values}
    if flags & 32:
        sections.sketch([t for t in layout if t.floating], values)
    assert not reader.read(), "bytes behind the last section or the sketch"
    return {t.name.decode(): rounded(values[t.name], t.dtype).reshape(t.shape) for t in layout}


class Reader(io.BytesIO):
    """Takes one field after the other from some bytes; `read()` is the rest."""

    def take(self, size: int) -> bytes:
        data = self.read(size)
        assert len(data) == size, "truncated"
        return data

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value, shift, byte = 0, 0, 128
        while byte >= 128:
            byte = self.byte()
            value, shift = value | (byte & 127) << shift, shift + 7
        assert (byte or shift == 7) and value < 2**63, "as short as possible"
        return value

    def behind_length(self) -> bytes:
        return self.take(self.varint())

    def scale(self, or_zero: bool = False) -> float:
        """A positive and finite float32."""
        value = float(struct.unpack("<f", self.take(4))[0])
        assert 0 < value < math.inf or (or_zero and value == 0)
        return value

    def inflate(self, size: int, exact: bool = True) -> bytes:
        """The rest, one whole raw DEFLATE stream: `size` bytes (at most, if not exact)."""
        stream = zlib.decompressobj(-15)
        result = stream.decompress(self.read(), size + 1)
        assert stream.eof and not stream.unused_data and len(result) <= size and (len(result) == size or not exact)
        return result

    def layout(self, is_digest: bool, like: Arrays | None) -> "list[Tensor]":
        """The tensors in the order of their sections."""
        model = sorted(Tensor(name.encode(), value.shape, value.dtype) for name, value in (like or {}).items())
        if is_digest:
            assert like is not None and self.take(8) == layout_digest(model), "another layout"
            return model
        deflated, layout, size = self.behind_length(), [], len(self.getbuffer())
        entries = Reader(Reader(deflated).inflate(min(2**24, 2**16 + 64 * len(deflated)), exact=False))
        while entries.tell() < len(entries.getbuffer()):
            name, dtype = entries.behind_length(), DTYPES[entries.byte()]
            layout.append(Tensor(name, tuple([entries.varint() for _ in range(entries.byte())]), dtype))
        assert len(layout) <= min(2**17, size) and len({t.name for t in layout}) == len(layout)
        assert like is None or layout_digest(layout) == layout_digest(model), "another layout"
        decoded_size = sum(t.size * max(4, t.dtype.itemsize) for t in layout)
        assert like is not None or decoded_size <= min(max(2**16 * size, 2**25), 2**30), "too large"
        return layout

    def factor(self, side: int, rank: int, known: Array | None) -> Array:
        """The levels of V or A."""
        count, weights = (0, b"") if known is None else (self.varint(), self.behind_length())
        levels = Reader(self.behind_length()).tile(side, rank)[0].astype(np.float32)
        assert weights or levels.any()
        if known is not None:
            assert 1 <= count <= min(128, side, known.shape[1])
            levels += known[:, :count].astype(np.float32) @ Reader(weights).tile(count, rank)[0].astype(np.float32)
        return levels.astype(np.float64)

    def tiles(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """The levels of a tensor and their contexts, flat: the rest of a section."""
        size = math.prod(shape)
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, size)
        if min(rows, columns) < 4:
            rows, columns = (size // 256, 256) if size > 1024 else (1, size)
        cells = np.zeros((2, size), np.int64)
        matrix, tail = cells[:, : rows * columns].reshape(2, rows, columns), cells[:, None, rows * columns :]
        cut, sides = rows * columns > 2**22, ((rows, columns), (columns, rows))
        down, across = (-(-side // max(2**11, 2**22 // other)) if cut else 1 for side, other in sides)
        bands = [matrix[:, k * rows // down : (k + 1) * rows // down] for k in range(down)]
        tiles = [b[:, :, k * columns // across : (k + 1) * columns // across] for b in bands for k in range(across)]
        tiles += [tail] if tail.size else []
        for tile in tiles:
            tile[:] = Reader(self.read() if tile is tiles[-1] else self.behind_length()).tile(*tile.shape[1:])
        return cells[0], cells[1]

    def integers(self, size: int, deflated: bool) -> Array:
        stored = DTYPES[self.byte()]
        data = self.inflate(size * stored.itemsize) if deflated else self.take(size * stored.itemsize)
        assert stored.kind in "biu" and not self.read()
        return np.frombuffer(data, np.uint8) != 0 if stored.kind == "b" else np.frombuffer(data, stored)

    def tile(self, rows: int, columns: int) -> Array:
        """The levels of a tile, and the contexts of those that are not zero: all bytes."""
        cells = np.zeros((2, rows, columns), np.int64)
        if not self.getvalue():
            return cells
        (spacings, base), nonzeros = struct.unpack("Bb", self.take(2)), self.varint()
        assert spacings < 16 and 1 <= nonzeros <= rows * columns
        spacing, across = (0, 1, 2, 4)[spacings & 3], (0, 1, 2, 4)[spacings >> 2]
        ranges = [(self.byte(), self.byte()) if s else (0, 0) for s in (spacing, across)]
        stream = Stream(self.read())
        row_classes = stream.classes(rows, *ranges[0]) if spacing else [1] * rows
        classes = stream.classes(columns, *ranges[1]) if across else [1] * columns
        kept = sorted((j for j in range(columns) if classes[j]), key=lambda j: -classes[j])
        blocks = [kept[k : k + 8] for k in range(0, len(kept), 8)]
        offsets = [across * (classes[block[:4][-1]] - 1) for block in blocks]
        offsets[-1] += (0, -6, -4, -3, -2, -1, -1, 0, 0)[len(blocks[-1])]
        for i in (i for i in range(rows) if row_classes[i]):
            contexts = [min(max(base + spacing * (row_classes[i] - 1) + offset, 0), 59) for offset in offsets]
            for j, context in stream.row(blocks, contexts):
                cells[:, i, j] = stream.level(context), context
        assert stream.x == 1 and not stream.words and np.count_nonzero(cells[0]) == nonzeros
        return cells


@dataclass(order=True)
class Tensor:
    """What the layout says of a tensor. Names differ, so it is sorted by name."""

    name: bytes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        assert len(self.name) <= 4096 and len(self.shape) <= 32 and math.prod(s for s in self.shape if s) < 2**59
        self.size, self.floating = math.prod(self.shape), self.dtype.kind == "f"

    def fold(self) -> tuple[list[int], int, int]:
        """The dimensions in their order in the folded matrix, and its height and width."""
        divisions = [(0, 1, *further) for further in itertools.product((0, 1), repeat=len(self.shape) - 2)]
        widths = [math.prod(itertools.compress(self.shape, division)) for division in divisions]
        best = min(range(len(divisions)), key=lambda k: widths[k] + self.size // widths[k])
        return sorted(range(len(self.shape)), key=divisions[best].__getitem__), self.size // widths[best], widths[best]


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value >> 7)


def layout_digest(layout: list[Tensor]) -> bytes:
    rows = sorted((t.name, bytes([t.floating, len(t.shape), *b"".join(map(varint, t.shape))])) for t in layout)
    return hashlib.blake2b(b"".join(varint(len(n)) + n + rest for n, rest in rows), digest_size=8).digest()


@dataclass
class Sections:
    """Reads sections, with all that turns their levels into values; `unit` is the gain times the step."""

    reader: Reader
    gain: float
    unit: float
    shifts: Array
    moves: dict[bytes, Array]

    def section(self, tensor: Tensor) -> Array:
        """The values of one tensor, flat."""
        kind = self.reader.byte()
        assert kind in ((0, 1, 2, 3, *range(16, 24)) if tensor.floating else (0, 4, 5)), "unknown kind"
        if kind == 0:
            return np.zeros(tensor.size)
        body = Reader(self.reader.behind_length())
        if kind > 3:
            return self.factors(body, tensor, kind) if tensor.floating else body.integers(tensor.size, kind == 5)
        scales = [body.scale(or_zero=kind == 3) for _ in range((0, 1, 3)[kind - 1])]
        offset = struct.unpack("b", body.take(1))[0] if kind == 2 else 0
        levels, contexts = body.tiles(tensor.shape)
        if kind < 3:
            return self.plain(levels, contexts) if kind == 1 else rounded((levels + offset) * scales[0])
        widths = zip(scales, (2, 8, 128), strict=True)
        values = [0.0, *((self.gain * scale) * (level / n) for scale, n in widths for level in range(1, n + 1))]
        return rounded(np.sign(levels) * np.array(values)[np.abs(levels)])

    def plain(self, levels: Array, contexts: Array) -> Array:
        assert self.unit > 0, "needs the step"
        shift = np.where(np.abs(levels) == 1, self.shifts[contexts // 4], self.shifts[15])
        return rounded(np.where(levels == 0, 0.0, np.sign(levels) * ((np.abs(levels) + shift) * self.unit)))

    def small(self, tensors: list[Tensor]) -> dict[bytes, Array]:
        """The tensors that share sections, by name."""
        floats, whole = [t for t in tensors if t.floating], [t for t in tensors if not t.floating]
        deflated = self.reader.behind_length()
        both = np.frombuffer(Reader(deflated).inflate(2 * len(floats)) if deflated else bytes(2 * len(floats)), np.int8)
        every = list(zip(floats, both[: len(floats)].view(np.uint8), both[len(floats) :], strict=True))
        assert all(b or not offset for _, b, offset in every), "an offset without a step"
        steps = {t.name: (2.0 ** (int(b) - 143), offset) for t, b, offset in every if b}
        values = self.joined([t for t in floats if t.name not in steps])
        if steps:
            levels = replace(self, unit=1.0, shifts=np.zeros(16)).joined([t for t in floats if t.name in steps])
            values |= {name: rounded((levels[name].astype(np.float64) + o) * s) for name, (s, o) in steps.items()}
        numbers = split(self.section(Tensor(b"", (sum(t.size for t in whole),), DTYPES[8])).astype("<i8"), whole)
        return values | {t.name: numbers[t.name].view("<u8" if t.dtype == np.uint64 else "<i8") for t in whole}

    def joined(self, tensors: list[Tensor]) -> dict[bytes, Array]:
        """The values of tensors that are one in the payload: their entries in rows of 32, filled up with zeros."""
        size = sum(t.size for t in tensors)
        assert self.reader.getvalue()[self.reader.tell()] in (0, 1), "a section of kind zero or plain"
        values = self.section(Tensor(b"", (-(-size // 32), 32), DTYPES[0]))
        assert not values[size:].any()
        return split(values, tensors)

    def factors(self, body: Reader, tensor: Tensor, kind: int) -> Array:
        """A product of two matrices of few columns, and for odd kinds what it leaves of the tensor."""
        assert self.unit > 0 and 2 <= len(tensor.shape) <= 6 and tensor.size, "needs the step and something to fold"
        (order, height, width), rank = tensor.fold(), body.varint()
        assert min(height, width) >= 8 and 1 <= rank <= min(64, height, width, 2**22 // max(height, width))
        move = self.moves[tensor.name].transpose(order).reshape(height, width) if kind & 6 else np.zeros(0)
        v = body.factor(width, rank, known_directions(move)[1] if kind & 2 else None)
        a = body.factor(height, rank, known_directions(move)[0] if kind & 4 else None)
        assert rank * self.unit * max(1.0, np.abs(a).max()) <= np.finfo(np.float32).max
        norms = np.sqrt(sum(row * row for row in v))
        v = np.rint(v * 2.0**24 / np.where(norms > 0, norms, 1.0)) * 2.0**-24
        folded = rounded((a @ v.T) * self.unit).reshape([tensor.shape[axis] for axis in order])
        product = folded.transpose(np.argsort(order)).reshape(-1)
        assert kind & 1 or not body.read()
        return rounded(product.astype(np.float64) + self.plain(*body.tiles(tensor.shape))) if kind & 1 else product

    def sketch(self, floats: list[Tensor], values: dict[bytes, Array]) -> None:
        """Add the estimate of what the sections left out."""
        seed, unit = int.from_bytes(self.reader.take(4), "little"), self.reader.scale()
        said = Reader(self.reader.behind_length()).inflate((2 if self.moves else 1) * len(floats))
        scales, counts = said[: len(floats)], said[len(floats) :] or bytes(len(floats))
        tensors = [(t, b, k) for t, b, k in zip(floats, scales, counts, strict=True) if b]
        size, blocks = sum(t.size for t, _, _ in tensors), self.reader.varint()
        assert 1 <= blocks <= size <= 2**15 * blocks
        opposite, column = np.divmod(np.frombuffer(self.reader.take(blocks), np.uint8), 128)
        dither, levels = uniform(blocks, seed, sequence=1) - 0.5, self.reader.tiles((blocks,))[0]
        length = rounded(((levels + np.rint(2.5 + dither)) - dither) * unit * np.where(opposite, -1.0, 1.0))
        number, block = np.divmod(np.arange(size), blocks)
        direction = normals(-(-size // blocks), seed)[number, column[block]]
        with np.errstate(over="ignore"):
            parts = split(direction * length[block], [t for t, _, _ in tensors])
            for t, b, k in tensors:
                part = rounded(parts[t.name] * rounded(np.array(2.0 ** ((b - 255) / 8))))
                part = stretched(t, k, part, self.moves[t.name]) if k else part
                values[t.name] = rounded(rounded(values[t.name]) + part.astype(np.float64))


def normals(rows: int, seed: int) -> Array:
    """Directions: the first 128 `rows` normal numbers, as float32."""
    x, y = 2 * uniform(400 * rows, seed).reshape(-1, 2).T - 1
    s = x * x + y * y
    x, y, s = (values[(s > 0) & (s < 1)][: 64 * rows] for values in (x, y, s))
    m, e = np.frexp(s)
    m, e = np.where(m < 0.7071067811865476, (2 * m, e - 1), (m, e))
    z, p = (m - 1) / (m + 1), np.zeros(len(s))
    for k in range(10, -1, -1):
        p = p * (z * z) + 1 / (2 * k + 1)
    f = np.sqrt(-2 * (e * 0.6931471805599453 + (2 * z) * p) / s)
    return np.stack([x * f, y * f], 1).astype(np.float32).reshape(rows, 128)


def stretched(tensor: Tensor, k: int, part: Array, move: Array) -> Array:
    """The estimate of a tensor, made longer along k known directions of its rows and of its columns."""
    order, height, width = tensor.fold()
    folded = move.transpose(order).reshape(height, width).astype(np.float64)
    moved, matrix = folded / np.abs(folded).max(), part.astype(np.float64).reshape(height, width)
    for q in known_directions(folded):
        assert 1 <= k <= min(32, q.shape[1])
        energies, others = np.square(moved.T @ q[:, :k]).sum(0), len(q) - k
        ordinary = (np.square(moved).sum() - energies.sum()) / others if others else 0.0
        t = np.maximum(energies / max(ordinary, energies.max() / 2**20), 1.0) ** (1 / 8)
        matrix = (matrix + q[:, :k] * (t - 1) @ (q[:, :k].T @ matrix)).T
        moved = moved.T
    return matrix.reshape([tensor.shape[axis] for axis in order]).transpose(np.argsort(order)).reshape(-1)


def split(joined: Array, tensors: list[Tensor]) -> dict[bytes, Array]:
    ends = itertools.accumulate(t.size for t in tensors)
    return {t.name: joined[end - t.size : end] for t, end in zip(tensors, ends, strict=True)}


def rounded(values: Array, dtype: np.dtype[Any] = DTYPES[0]) -> Array:
    """As numbers of a dtype: the nearest one that is finite for floating-point types, the same number for others."""
    if dtype.kind == "f":
        return np.clip(values, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)
    assert all(int(a) == int(b) for a, b in zip(values, values.astype(dtype), strict=True)), "not of the dtype"
    return values.astype(dtype)


def read_basis(layout: list[Tensor], drift: Arrays, digest: bytes) -> dict[bytes, Array]:
    """What each tensor of floats has moved, if the payload was made for just that."""
    moves = {t.name: drift[t.name.decode()].astype("<f4").reshape(t.shape) for t in sorted(layout) if t.floating}
    hashes = b"".join(hashlib.sha256(move.tobytes()).digest() for move in moves.values())
    assert hashlib.sha256(layout_digest(layout) + hashes).digest()[:8] == digest, "another basis"
    return moves


def known_directions(move: Array) -> tuple[Array, Array]:
    """The directions of rows and those of columns in which a folded tensor has moved."""
    assert 1e-30 <= np.abs(move).max() <= 1e30
    d, width, k = move.astype(np.float64) / np.abs(move).max(), move.shape[1], min(128, *move.shape)
    q = (2 * uniform(width * k) - 1).reshape(width, k)
    for _ in range(2):
        q, diagonal = orthonormal(d.T @ (d @ q))
    usable = np.cumprod(diagonal > 5e-6 * diagonal.max()).sum()
    return orthonormal(d @ q)[0][:, :usable], q[:, :usable]


def uniform(size: int, seed: int = 0, sequence: int = 0) -> Array:
    """The first of the random numbers u."""
    golden = np.array([0x9E3779B97F4A7C15], np.uint64)
    key = mix(mix(np.uint64(seed) + golden) ^ np.uint64(sequence) * golden)
    return (mix(key + np.arange(size, dtype=np.uint64) * golden) >> np.uint64(11)) / 2.0**53


def mix(x: Array) -> Array:
    """The finaliser of splitmix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def orthonormal(matrix: Array) -> tuple[Array, Array]:
    """The Q of a QR decomposition and the diagonal of R, which is made positive."""
    q, r = np.linalg.qr(matrix)
    return q * np.where(np.diag(r) < 0, -1.0, 1.0), np.abs(np.diag(r))


class Stream:
    """The symbols of a tile: the coder, and its adaptive tables by what they are for."""

    def __init__(self, data: bytes) -> None:
        head = len(data) if len(data) <= 8 else 5 + (len(data) - 5) % 4
        self.x = int.from_bytes(data[:head], "little") % 2**63
        self.words = [word for (word,) in struct.iter_unpack("<I", data[head:])][::-1]
        self.tables = {
            (kind, c): initial_table(kind, c) for kind in ("group", "sparse", "dense", "level") for c in range(60)
        }

    def advance(self, start: int, frequency: int) -> None:
        self.x = frequency * (self.x >> 16) + self.x % 2**16 - start
        if self.x < 2**31 and self.words:
            self.x = self.x << 32 | self.words.pop()

    def classes(self, size: int, first: int, last: int) -> list[int]:
        assert 1 <= first <= last <= 80
        count, symbols = last - first + 2, [0]
        tables = [Table([3] * count, [1] * count, 2**16) for _ in range(count)]
        for _ in range(size):
            symbol, start, frequency = tables[symbols[-1]].find(self.x % 2**16)
            self.advance(start, frequency)
            symbols.append(symbol)
        return [symbol + first - 1 if symbol else 0 for symbol in symbols[1:]]

    def row(self, blocks: list[list[int]], contexts: list[int]) -> list[tuple[int, int]]:
        """The columns of a row's non-zeros in the order of the stream, each with its context."""
        found = []
        for begin in range(0, len(blocks), 8):
            group = range(begin, min(begin + 8, len(blocks)))
            context = contexts[group[:4][-1]]
            sparse = context < 16
            for k in [group[n] for n in self.pattern("group", context, len(group))] if sparse else group:
                ones = self.pattern("sparse" if sparse else "dense", contexts[k], len(blocks[k]))
                assert ones or not sparse, "known not to be empty"
                found += [(blocks[k][n], contexts[k]) for n in ones]
        return found

    def pattern(self, kind: str, context: int, width: int) -> list[int]:
        """Which of so many cells (or blocks) are not zero."""
        slot = self.x % 2**16
        ones, start, frequency = self.tables[kind, context].find(slot)
        patterns = [number for number in range(2**width) if number.bit_count() == ones]
        rank = (slot - start) * len(patterns) // frequency
        begin, end = (-(-r * frequency // len(patterns)) for r in (rank, rank + 1))
        self.advance(start + begin, end - begin)
        return [n for n in range(width) if patterns[rank] >> n & 1]

    def level(self, context: int) -> int:
        negative, slot = divmod(self.x % 2**16, 2**15)
        symbol, start, frequency = self.tables["level", context].find(slot)
        self.advance(start + 2**15 * negative, frequency)
        size = symbol + 1
        if symbol >= 8:
            bits = (symbol - 8) // 2 + 2
            low = self.x % 2**16 >> 16 - bits
            self.advance(low << 16 - bits, 1 << 16 - bits)
            size = ((2 + symbol % 2) << bits) + low + 1
        return -size if negative else size


class Table:
    """Frequencies of symbols that adapt to those that have come."""

    def __init__(self, counts: list[int], floors: list[int], total: int) -> None:
        self.counts, self.floors, self.total = counts, floors, total
        self.p = self.until_rebuild = 0

    def find(self, slot: int) -> tuple[int, int, int]:
        """The symbol at a slot, its start and its frequency; the table adapts to it."""
        if self.until_rebuild == 0:
            s = 2**32 * (self.total - sum(self.floors)) // sum(self.counts)
            others = [floor + (count * s >> 32) for floor, count in zip(self.floors, self.counts, strict=True)][1:]
            self.frequencies = [self.total - sum(others), *others]
            self.p, self.until_rebuild = self.p + 1 + self.p // 4, self.p + 1
        ends = list(itertools.accumulate(self.frequencies))
        symbol = next(k for k, end in enumerate(ends) if slot < end)
        self.counts[symbol] += 16
        self.until_rebuild -= 1
        return symbol, ends[symbol] - self.frequencies[symbol], self.frequencies[symbol]


def power(x: float, n: int) -> float:
    """x^n, rounded the same everywhere."""
    result = 1.0
    while n:
        result, x, n = result * x if n % 2 else result, x * x, n // 2
    return result


def initial_table(kind: str, context: int) -> Table:
    """Of magnitudes, or of the ones in patterns of groups, of blocks in sparse groups and of other blocks."""
    half_octaves = (min(context + 6, 59) if kind == "group" else context) - 22
    p = (m := power(math.sqrt(2.0 if half_octaves >= 0 else 0.5), abs(half_octaves))) / (1 + m)
    if kind == "level":
        q = max(0.2, p)
        firsts = [*range(8), *(2**e + half * 2 ** (e - 1) for e in range(3, 17) for half in (0, 1)), 2**17]
        counts = [max(1, int(32 * (power(q, a) - power(q, b)))) for a, b in itertools.pairwise(firsts)]
        return Table(counts, [1] * 36, 2**15)
    floors = [math.comb(8, k) for k in range(9)]
    counts = [max(1, int(32 * (c * power(p, k) * power(1 - p, 8 - k)))) for k, c in enumerate(floors)]
    return Table(counts, floors, 2**16)
