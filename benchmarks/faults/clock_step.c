/* A wall clock that can step. The file at BATON_CLOCK_STEP has one int64: the seconds to add to the wall clock of every
 * process that has this library in LD_PRELOAD. Monotonic clocks are unchanged, as after a step of NTP.
 *
 * libfaketime 0.9.10 is not used, because `time.sleep` of Python 3.11 fails with EINVAL under it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t nothing = 0, *step = &nothing;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("BATON_CLOCK_STEP");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) step = page;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real_clock) start(); /* another constructor runs before this one */
    int failed = real_clock(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *step;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec wall;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &wall)) return -1;
    *now = (struct timeval){wall.tv_sec, wall.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *at) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    if (at) *at = wall.tv_sec;
    return wall.tv_sec;
}
