// Runs one tape for tests/cpu/aarch64.py: maps a snapshot of the memory that its kernels use at the addresses it had in
// the process that made it, calls the kernels in order on one thread, and writes the result's bytes to stdout.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef void kernel(int64_t args, int64_t begin, int64_t end, int64_t scratch);
extern kernel *const edgellm_tape[];

static int64_t number(FILE *f) {
    int64_t x;
    if (fread(&x, 8, 1, f) != 1) exit(2);
    return x;
}

int main(int argc, char **argv) {
    FILE *f = fopen(argv[1], "rb");
    if (argc < 2 || !f) return 2;
    for (int64_t n = number(f); n > 0; n--) {
        int64_t address = number(f), size = number(f);
        void *at = mmap((void *)address, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (at == MAP_FAILED || fread(at, 1, size, f) != (size_t)size) return 3;
    }
    int64_t ops = number(f), scratch = number(f);
    char *own = aligned_alloc(64, (scratch + 127) / 64 * 64);
    for (int64_t i = 0; i < ops; i++) {
        int64_t args = number(f), units = number(f);
        edgellm_tape[i](args, 0, units, (int64_t)own);
    }
    int64_t out = number(f), size = number(f);
    return fwrite((void *)out, 1, size, stdout) == (size_t)size ? 0 : 4;
}
