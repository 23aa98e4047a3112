"""One file under several numbers: what overlay file systems show of an inode.

A container's root is an overlay mount with a device number of its own, over layers that containers
of one image share. A probe belongs to the inode below, so two mounts' views of one file must not be
probed as two: every call would be counted twice. /proc/PID/maps shows the inode below up to Linux
6.7, and since then the mount's view of it. stat always shows the view: its own device number, the
inode number below (some high bits may tell the layer's file system), size and times of the inode
below.
"""

from __future__ import annotations

import ctypes
import os

OVERLAY_MAGIC = 0x794C7630  # linux/magic.h OVERLAYFS_SUPER_MAGIC
_INODE_BITS = (1 << 56) - 1  # above: the layer, with xino

Key = tuple[int, int]  # device and inode number, as in maps
Real = tuple[int, ...]

_libc = ctypes.CDLL(None, use_errno=True)


def same_file(status: os.stat_result, key: Key) -> bool:
    """Whether an opened file is the mapped one. Overlay and btrfs show another device number in
    maps than in stat: there the inode number decides."""
    return (status.st_ino ^ key[1]) & _INODE_BITS == 0


def real_file(fd: int, status: os.stat_result) -> Real:
    """Equal for two views of one inode, different for two inodes.

    Of an overlay file by inode number, size and times: a change time to the nanosecond cannot be
    set by anybody. Elsewhere by device and inode number; times would not do there, since a snapshot
    is another inode with all of them the same.
    """
    if not on_overlay(fd):
        return (status.st_dev, status.st_ino)
    return (status.st_ino & _INODE_BITS, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def on_overlay(fd: int) -> bool:
    buffer = (ctypes.c_long * 64)()  # struct statfs, 120 bytes; it begins with f_type
    if _libc.fstatfs(fd, buffer) != 0:
        return False
    return bool(buffer[0] == OVERLAY_MAGIC)
