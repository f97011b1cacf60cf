"""A client written from docs/protocol.md alone, with a decoder of its own: standard library only.

  python3 tests/client_py.py SOCKET "prompt"      stream one answer of a server
"""
import socket
import struct
import sys


# ---- MessagePack ----

def pack(v):
    if v is None:
        return b"\xc0"
    if v is True or v is False:
        return b"\xc3" if v else b"\xc2"
    if isinstance(v, int):
        if 0 <= v < 128:
            return struct.pack("B", v)
        if -32 <= v < 0:
            return struct.pack("b", v)
        return struct.pack(">BQ", 0xcf, v) if v > 0 else struct.pack(">Bq", 0xd3, v)
    if isinstance(v, float):
        return struct.pack(">Bd", 0xcb, v)
    if isinstance(v, str):
        b = v.encode()
        return (bytes([0xa0 | len(b)]) if len(b) < 32 else struct.pack(">BI", 0xdb, len(b))) + b
    if isinstance(v, (bytes, bytearray)):
        return struct.pack(">BI", 0xc6, len(v)) + bytes(v)
    if isinstance(v, (list, tuple)):
        return struct.pack(">BI", 0xdd, len(v)) + b"".join(map(pack, v))
    if isinstance(v, dict):
        return struct.pack(">BI", 0xdf, len(v)) + b"".join(pack(k) + pack(x) for k, x in v.items())
    raise TypeError(type(v))


class NeedMore(Exception):
    pass


class Unpacker:
    def __init__(self):
        self.buf = b""

    def feed(self, data):
        self.buf += data

    def take(self, n):
        if self.at + n > len(self.buf):
            raise NeedMore
        self.at += n
        return self.buf[self.at - n:self.at]

    def number(self, fmt):
        return struct.unpack(">" + fmt, self.take(struct.calcsize(fmt)))[0]

    def value(self):
        b = self.number("B")
        if b <= 0x7f:
            return b
        if b <= 0x8f:
            return self.map(b & 15)
        if b <= 0x9f:
            return self.array(b & 15)
        if b <= 0xbf:
            return self.take(b & 31).decode()
        if b >= 0xe0:
            return b - 256
        one = {0xc0: None, 0xc2: False, 0xc3: True}
        if b in one:
            return one[b]
        numbers = {0xca: "f", 0xcb: "d", 0xcc: "B", 0xcd: "H", 0xce: "I", 0xcf: "Q",
                   0xd0: "b", 0xd1: "h", 0xd2: "i", 0xd3: "q"}
        if b in numbers:
            return self.number(numbers[b])
        if b in (0xc4, 0xc5, 0xc6):
            return self.take(self.number("BHI"[b - 0xc4]))
        if b in (0xd9, 0xda, 0xdb):
            return self.take(self.number("BHI"[b - 0xd9])).decode()
        if b in (0xdc, 0xdd):
            return self.array(self.number("HI"[b - 0xdc]))
        if b in (0xde, 0xdf):
            return self.map(self.number("HI"[b - 0xde]))
        raise ValueError(f"byte {b:02x}")

    def array(self, n):
        return [self.value() for _ in range(n)]

    def map(self, n):
        return {self.value(): self.value() for _ in range(n)}

    def next(self):
        """One message; None where it is not complete."""
        self.at = 0
        try:
            v = self.value()
        except NeedMore:
            return None
        self.buf = self.buf[self.at:]
        return v


# ---- The protocol ----

class Refused(Exception):
    def __init__(self, error):
        self.code, self.message, self.data = error
        super().__init__(f"{self.data['name']}: {self.message}")


class Client:
    def __init__(self, address, token=None, packer=pack, unpacker=Unpacker, timeout=10):
        if isinstance(address, str):
            self.sock = socket.socket(socket.AF_UNIX)
        else:
            self.sock = socket.socket(socket.AF_INET)
        self.sock.settimeout(timeout)
        self.sock.connect(address)
        self.pack, self.unpacker = packer, unpacker()
        self.last_id = 0
        self.waiting = []  # notifications read while a response was awaited
        options = {"client": "client_py", "protocol": 1}
        if token is not None:
            options["token"] = token
        self.info = self.call("hello", options)

    def close(self):
        self.sock.close()

    def send(self, method, *params):
        self.last_id += 1
        self.sock.sendall(self.pack([0, self.last_id, method, list(params)]))
        return self.last_id

    def receive(self):
        while True:
            m = self.unpacker.next()
            if m is not None:
                return m
            data = self.sock.recv(65536)
            if not data:
                raise EOFError("the server closed the connection")
            self.unpacker.feed(data)

    def response(self, msgid):
        while True:
            m = self.receive()
            if m[0] == 2:
                self.waiting.append(m)
            elif m[1] == msgid:
                if m[2] is not None:
                    raise Refused(m[2])
                return m[3]
            else:
                raise ValueError(f"response to {m[1]}, which nobody asked")

    def call(self, method, *params):
        return self.response(self.send(method, *params))

    def notification(self):
        if self.waiting:
            return self.waiting.pop(0)
        m = self.receive()
        if m[0] != 2:
            raise ValueError(f"unexpected {m}")
        return m

    def stream(self, method, *params):
        """Yields the map of each `token`; the last value is the map of `done`, in .done."""
        self.stream_id = self.call(method, *params)["stream"]
        while True:
            _, name, (stream_id, body) = self.notification()
            if stream_id != self.stream_id:
                continue
            if name == "done":
                self.done = body
                return
            if name == "token":
                yield body

    def text(self, method, *params):
        parts = [t.get("text", t.get("bytes")) for t in self.stream(method, *params)]
        return b"".join(p.encode() if isinstance(p, str) else p for p in parts)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    client = Client(sys.argv[1])
    for piece in client.stream("generate", sys.argv[2], {"max_tokens": 64}):
        print(piece.get("text", ""), end="", flush=True)
    print("\n", client.done)
    spec = client.done["speculation"]
    print(f'{spec["accepted"]} of {spec["drafted"]} draft tokens accepted, '
          f'{spec["tokens_per_round"]} tokens a round')
