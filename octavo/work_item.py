"""Layout of a plan: a header, then work items of int32 words. The planner writes it, both attention kernels read it.

An item is one query tile of one K/V head over one range of keys, or a run of tiles that see no key. Rows of a tile are
(token, head in group) pairs, token major: row r of a sequence is token r // group_size, query head
kv_head * group_size + r % group_size.
"""

HEADER_WORDS = 16
NUM_ITEMS = 0  # header words: items that follow
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
ROW_COUNT = 14  # rows of the item: one tile, or several where no row sees a key
