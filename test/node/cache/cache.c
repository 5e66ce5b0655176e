/*
 * Preloaded into user-mode Linux, so that one of its disks has a write cache
 * that a power cut empties.
 *
 * Before each write to the file $CACHE_DISK, the overwritten data is appended to
 * the file $CACHE_UNDO; a flush (fsync, fdatasync) empties that. After a cut,
 * the writes in $CACHE_UNDO are those that a disk may have lost, in whole or in
 * part and in any order: the program that cut the power undoes some of them.
 *
 * An entry is offset and length, 64 bits each, and the bytes. User-mode Linux
 * writes to its disks from one thread only. $CACHE_UNDO.flushed is no longer
 * empty once there was a flush.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int undo = -1, flushed = -1;
static long writer; /* the thread that writes to disks */
static dev_t device;
static ino_t inode;

__attribute__((constructor)) static void begin(void)
{
	const char *disk = getenv("CACHE_DISK"), *file = getenv("CACHE_UNDO");
	char path[4096];
	struct stat st;

	if (!disk || !file || stat(disk, &st) < 0)
		return;
	device = st.st_dev;
	inode = st.st_ino;
	undo = open(file, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (snprintf(path, sizeof path, "%s.flushed", file) < (int)sizeof path)
		flushed = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static int cached(int fd)
{
	struct stat st;

	return undo >= 0 && fd != undo && fstat(fd, &st) == 0 && st.st_dev == device && st.st_ino == inode;
}

static int remember(int fd, size_t length, off64_t offset)
{
	static char old[1 << 20];
	uint64_t head[2];
	struct iovec parts[2] = {{head, sizeof head}, {old, 0}};

	while (length > 0) {
		size_t part = length < sizeof old ? length : sizeof old;
		ssize_t got = syscall(SYS_pread64, fd, old, part, offset);

		if (got <= 0)
			return got == 0 ? 0 : -1; /* beyond the end: nothing is overwritten */
		head[0] = offset;
		head[1] = got;
		parts[1].iov_len = got;
		if (syscall(SYS_writev, undo, parts, 2) != (ssize_t)(sizeof head + got)) {
			errno = EIO;
			return -1;
		}
		offset += got;
		length -= got;
	}
	return 0;
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset)
{
	writer = syscall(SYS_gettid);
	if (cached(fd) && remember(fd, length, offset) < 0)
		return -1;
	return syscall(SYS_pwrite64, fd, data, length, offset);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
	return pwrite64(fd, data, length, offset);
}

static int flush(int fd, long number)
{
	int failed = syscall(number, fd);

	if (!failed && cached(fd)) {
		failed = syscall(SYS_ftruncate, undo, 0);
		syscall(SYS_ftruncate, flushed, 1);
	}
	return failed;
}

int fsync(int fd) { return flush(fd, SYS_fsync); }

int fdatasync(int fd) { return flush(fd, SYS_fdatasync); }

/*
 * User-mode Linux tells its block layer that the disk flushes its cache, and
 * then does not call fdatasync: a flush is a request without segments, over
 * which its thread loops in vain (arch/um/drivers/ubd_kern.c, 5.0 and later). So
 * a flush is detected where that thread returns the finished requests. What was
 * written between the flush and that point counts as flushed, too.
 */
struct io_thread_req {
	void *request;
	int fds[2];
	unsigned long offsets[2];
	unsigned long long offset;
	int sector, error, segments;
};

ssize_t write(int fd, const void *data, size_t length)
{
	struct io_thread_req *const *done = data;

	if (writer && syscall(SYS_gettid) == writer && length % sizeof *done == 0)
		for (size_t i = 0; i < length / sizeof *done; i++)
			if (done[i]->segments == 0)
				flush(done[i]->fds[0], SYS_fdatasync);
	return syscall(SYS_write, fd, data, length);
}
