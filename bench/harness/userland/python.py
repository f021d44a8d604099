"""Objects, dictionaries, strings and recursion; exits with 42 if the results are right."""


class Node:
    def __init__(self, key):
        self.key, self.left, self.right = key, None, None

    def insert(self, key):
        node = self
        while True:
            side = "left" if key < node.key else "right"
            below = getattr(node, side)
            if below is None:
                setattr(node, side, Node(key))
                return
            node = below

    def walk(self):
        if self.left:
            yield from self.left.walk()
        yield self.key
        if self.right:
            yield from self.right.walk()


def numbers(count, state=12345):
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        yield state


def queens(size, row=0, columns=0, up=0, down=0):
    if row == size:
        return 1
    free = ~(columns | up | down) & (1 << size) - 1
    found = 0
    while free:
        bit = free & -free
        free ^= bit
        found += queens(size, row + 1, columns | bit, (up | bit) << 1, (down | bit) >> 1)
    return found


def words(count):
    counts = {}
    for number in numbers(count):
        word = "w%x" % (number % 997)
        counts[word] = counts.get(word, 0) + 1
    return len(counts), sum(counts.values()), len(" ".join(sorted(counts)))


def main():
    tree = Node(2**30)
    for number in numbers(3000):
        tree.insert(number)
    keys = list(tree.walk())
    right = keys == sorted(keys) and len(keys) == 3001
    right = right and queens(7) == 40 and words(20000)[:2] == (997, 20000)
    raise SystemExit(42 if right else 1)


main()
