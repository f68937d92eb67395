/* Preloaded before the C library: a real-time clock that jumps. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Offset of the clock in seconds. It changes every two seconds: none, +25 hours, -463 days, -1 minute. */
static time_t jump(void) {
    static const time_t offsets[] = {0, 90000, -40000000, -60};
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return offsets[(now.tv_sec / 2) % 4];
}

int clock_gettime(clockid_t which, struct timespec *found) {
    int code = syscall(SYS_clock_gettime, which, found);
    if (code == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) found->tv_sec += jump();
    return code;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
