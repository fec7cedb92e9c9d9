"""Layout of a plan: a header, then work items, then partial states. The planner writes header and items.

An item is one query tile of one K/V head over one range of keys, or a run of tiles that see no key, or nothing. Rows of
a tile are (token, head in group) pairs, token major: row r of a sequence is token r // group_size, query head
kv_head * group_size + r % group_size.

Items are in two lists: the main one from the first place up, the small one (sequences of few rows, in tiles of fewer
rows) from the last place down. Parts of a tile follow each other, in their list's direction.

Partial states are float32: those of the main list, then those of the small one; in each list the outs
[states, tile rows, value_dim], then the lses [states, tile rows]. Regions begin at multiples of ITEM_WORDS.
"""

HEADER_WORDS = 16
NUM_ITEMS = 0  # header words: items of the main list
NUM_SMALL_ITEMS = 1  # of the small list
ITEMS_TAKEN = 8  # 0 before a kernel that draws items from it, and again after; away from what every program reads

ITEM_WORDS = 16  # 64 bytes: an item is read from two 32-byte sectors
Q_START = 0  # first token of the sequence
Q_LEN = 1  # its tokens
KV_LEN = 2  # its keys
PAGE_LOW = 3  # position of its first page in the page table, low and high 32 bits
PAGE_HIGH = 4
KV_HEAD = 5
ROW_BEGIN = 6  # first row of the tile, a multiple of the tile's rows
KEY_BEGIN = 7  # keys [KEY_BEGIN, KEY_END) are this item's: those that some row of the tile sees
KEY_END = 8
FULL_END = 9  # keys [KEY_BEGIN, FULL_END) are seen by every row of the tile, so they need no mask
SPLIT = 10  # this item is part SPLIT of NUM_SPLITS of its tile's keys
NUM_SPLITS = 11
SLOT = 12  # first partial state of the tile in the workspace, where NUM_SPLITS > 1
SEQUENCE = 13
ROW_COUNT = 14  # rows of the item: one tile, several where no row sees a key, or 0 where there is nothing to do
ARRIVED = 15  # of a tile's first part: parts whose partial state is written; 0 before the kernel, and again after
