// Stands between a process and its disk (LD_PRELOAD): at every system call that changes
// something below a folder, the process dies, or the folder is copied as it is then.
//
// A copy is what a SIGKILL at that moment would leave: the kernel keeps the rest. The
// calls below the folder happen one at a time, also those of several processes.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[PATH_MAX];   // the folder; empty before `watch`
static char copies[PATH_MAX];  // where copies go; empty for none
static long count, deadly;     // calls so far, and the one to die at
static int lock_file = -1;     // locked during a call, against other processes
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

// Begins: `at` is the call to die at, counted from 1; 0 is never.
void watch(const char *folder, long at, const char *copies_to) {
  snprintf(copies, sizeof copies, "%s", copies_to);
  if (*copies) {
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/.lock", copies);
    lock_file = open(path, O_CREAT | O_RDWR, 0600);
  }
  deadly = at;
  count = 0;
  snprintf(below, sizeof below, "%s", folder);
}

// Ends; returns how many calls there were.
long watched(void) {
  *below = 0;
  return count;
}

static int concerns(const char *path) {
  size_t length = strlen(below);
  return length && !strncmp(path, below, length) &&
         (path[length] == '/' || path[length] == 0);
}

static int path_concerns(int folder, const char *path) {
  char link[64], whole[2 * PATH_MAX];
  if (!*below) return 0;
  if (*path == '/') return concerns(path);
  if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
  else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t length = readlink(link, whole, PATH_MAX);
  if (length < 0) return 0;
  snprintf(whole + length, sizeof whole - length, "/%s", path);
  return concerns(whole);
}

static int file_concerns(int file) {
  char link[64], path[PATH_MAX + 1];
  if (!*below) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, PATH_MAX);
  if (length < 0) return 0;
  path[length] = 0;
  return concerns(path);
}

// Before a call; returns whether it is the last one.
static int begin(void) {
  pthread_mutex_lock(&mutex);
  if (lock_file >= 0) flock(lock_file, LOCK_EX);
  count++;
  if (*copies) {
    char command[3 * PATH_MAX];
    snprintf(command, sizeof command,
             "unset LD_PRELOAD; cp -a '%s' '%s/%d-%ld'", below, copies, getpid(), count);
    if (system(command)) _exit(99);
  }
  return count == deadly;
}

static void end(void) {
  if (lock_file >= 0) flock(lock_file, LOCK_UN);
  pthread_mutex_unlock(&mutex);
}

static void die(void) {
  kill(getpid(), SIGKILL);
  pause();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

// A call that changes names: one dies before it.
#define NAMES(name, concerned, parameters, ...)          \
  int name parameters {                                  \
    __typeof__(&name) real = REAL(name);                 \
    if (!(concerned)) return real(__VA_ARGS__);          \
    if (begin()) die();                                  \
    int result = real(__VA_ARGS__);                      \
    end();                                               \
    return result;                                       \
  }

#define HERE(path) path_concerns(AT_FDCWD, path)

NAMES(rename, HERE(a) || HERE(b), (const char *a, const char *b), a, b)
NAMES(renameat, path_concerns(d, a) || path_concerns(e, b),
      (int d, const char *a, int e, const char *b), d, a, e, b)
NAMES(renameat2, path_concerns(d, a) || path_concerns(e, b),
      (int d, const char *a, int e, const char *b, unsigned f), d, a, e, b, f)
NAMES(link, HERE(b), (const char *a, const char *b), a, b)
NAMES(linkat, path_concerns(e, b),
      (int d, const char *a, int e, const char *b, int f), d, a, e, b, f)
NAMES(symlink, HERE(b), (const char *a, const char *b), a, b)
NAMES(symlinkat, path_concerns(d, b), (const char *a, int d, const char *b), a, d, b)
NAMES(unlink, HERE(a), (const char *a), a)
NAMES(unlinkat, path_concerns(d, a), (int d, const char *a, int f), d, a, f)
NAMES(remove, HERE(a), (const char *a), a)
NAMES(rmdir, HERE(a), (const char *a), a)
NAMES(mkdir, HERE(a), (const char *a, mode_t m), a, m)
NAMES(mkdirat, path_concerns(d, a), (int d, const char *a, mode_t m), d, a, m)
NAMES(truncate, HERE(a), (const char *a, off_t n), a, n)
NAMES(ftruncate, file_concerns(f), (int f, off_t n), f, n)
NAMES(ftruncate64, file_concerns(f), (int f, off64_t n), f, n)
NAMES(fallocate, file_concerns(f), (int f, int m, off_t o, off_t n), f, m, o, n)
NAMES(fsync, file_concerns(f), (int f), f)
NAMES(fdatasync, file_concerns(f), (int f), f)

// A call that may make or empty a file.
#define OPENS(name, folder, parameters, ...)                             \
  int name parameters {                                                  \
    __typeof__(&name) real = REAL(name);                                 \
    mode_t mode = 0;                                                     \
    if (flags & (O_CREAT | __O_TMPFILE)) {                               \
      va_list rest;                                                      \
      va_start(rest, flags);                                             \
      mode = va_arg(rest, mode_t);                                       \
      va_end(rest);                                                      \
    }                                                                    \
    if (!(flags & (O_CREAT | O_TRUNC)) || !path_concerns(folder, path))  \
      return real(__VA_ARGS__, mode);                                    \
    if (begin()) die();                                                  \
    int result = real(__VA_ARGS__, mode);                                \
    end();                                                               \
    return result;                                                       \
  }

OPENS(open, AT_FDCWD, (const char *path, int flags, ...), path, flags)
OPENS(open64, AT_FDCWD, (const char *path, int flags, ...), path, flags)
OPENS(openat, folder, (int folder, const char *path, int flags, ...), folder, path, flags)
OPENS(openat64, folder, (int folder, const char *path, int flags, ...), folder, path,
      flags)

// A call that writes: one dies in its midst.
#define WRITES(name, parameters, half, ...)                       \
  ssize_t name parameters {                                       \
    __typeof__(&name) real = REAL(name);                          \
    if (!file_concerns(file)) return real(file, __VA_ARGS__);     \
    if (begin()) {                                                \
      size /= half;                                               \
      if (real(file, __VA_ARGS__) >= 0) die();                    \
      die();                                                      \
    }                                                             \
    ssize_t result = real(file, __VA_ARGS__);                     \
    end();                                                        \
    return result;                                                \
  }

WRITES(write, (int file, const void *data, size_t size), 2, data, size)
WRITES(pwrite, (int file, const void *data, size_t size, off_t at), 2, data, size, at)
WRITES(pwrite64, (int file, const void *data, size_t size, off64_t at), 2, data, size,
       at)
WRITES(writev, (int file, const struct iovec *data, int size), 2, data, size)
WRITES(pwritev, (int file, const struct iovec *data, int size, off_t at), 2, data, size,
       at)
WRITES(pwritev64, (int file, const struct iovec *data, int size, off64_t at), 2, data,
       size, at)
