/* C interface of a host library of kernels (libquire_sim_<crate>.so); see device/simt/README.md. */
#ifndef QUIRE_SIM_H
#define QUIRE_SIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define QUIRE_SIM_API __attribute__((visibility("default")))

/* Incremented when anything below changes. */
#define QUIRE_SIM_ABI 8

/* Why a launch failed. */
enum {
    QUIRE_SIM_OK = 0,
    QUIRE_SIM_UNKNOWN_KERNEL = 1,
    QUIRE_SIM_BAD_LAUNCH = 2,           /* grid, block or shared memory beyond the limits */
    QUIRE_SIM_DIVERGENT_BARRIER = 3,    /* threads of a block wait at different barriers */
    QUIRE_SIM_BARRIER_AFTER_EXIT = 4,   /* some threads wait at a barrier, others have exited */
    QUIRE_SIM_DEADLOCK = 5,             /* threads wait for each other at a barrier and in a warp */
    QUIRE_SIM_BAD_MASK = 6,             /* the mask of a warp operation excludes the caller, or names an exited lane */
    QUIRE_SIM_DIVERGENT_COLLECTIVE = 7, /* lanes of a mask call different operations */
    QUIRE_SIM_BAD_LANE = 8,             /* a shuffle reads from a lane outside of its mask */
    QUIRE_SIM_MISALIGNED = 9,           /* ldmatrix or cp.async at an address that is not a multiple of 16 */
    QUIRE_SIM_TRAP = 10,                /* the kernel called __trap() */
    QUIRE_SIM_BAD_ASYNC = 11,           /* wrong use of an mbarrier, a bulk copy or a wgmma */
    QUIRE_SIM_TOO_EARLY = 12            /* a thread of an overlapped kernel accesses global memory, or exits, without a wait */
};

typedef struct {
    const char* name;
    const char* file;                /* source file that defines it */
    const uint32_t* parameter_bytes; /* size of each parameter */
    uint32_t parameters;
    uint32_t shared_bytes;           /* dynamic shared memory that its blocks need; every launch gets at least that */
    uint32_t overlapped;             /* 1 if its threads wait for the launches before it (QUIRE_EXPORT_OVERLAPPED), otherwise 0 */
    uint32_t threads, rows;          /* of a block (QUIRE_EXPORT_TILED); 0 if the kernel does not say */
} quire_sim_kernel;

typedef struct {
    int32_t code; /* one of the codes above */
    uint32_t block[3], thread[3];
    int32_t line;         /* source line; 0 if the fault has none */
    const char* kernel;
    const char* file;     /* "" if the fault has none */
    const char* message;  /* all of the above in one line */
} quire_sim_fault;

/* What a launch did. A request is one load, store or atomic operation of the lanes of a warp that execute it together; a copy of
   the copy engine counts a request for each row of its box. */
typedef struct {
    uint64_t blocks;                 /* of the grid */
    uint64_t busy_blocks;            /* that wrote to global memory */
    uint64_t read_bytes;             /* from global memory, by all lanes */
    uint64_t written_bytes;          /* to global memory, by all lanes */
    uint64_t distinct_read_bytes;    /* each byte once */
    uint64_t distinct_written_bytes;
    uint64_t requests;               /* to global memory */
    uint64_t sectors;                /* of 32 bytes that the requests touch */
    uint64_t distinct_sectors;       /* each sector once that was read, and once that was written */
    uint64_t wanted_bytes;           /* of the sectors: those that some lane of the request accesses */
    uint64_t shared_requests;        /* to shared memory */
    uint64_t shared_passes;          /* over its 32 banks that they take */
    uint64_t bank_conflicts;         /* passes over the 32 banks of shared memory beyond those that the widths need */
    uint64_t barriers;               /* that opened: of blocks, named ones, and of warps */
    uint64_t products;               /* mma of a warp */
    uint64_t warpgroup_products;     /* wgmma of a warpgroup */
    uint64_t multiply_adds;          /* of both */
    uint64_t exponentials;           /* that lanes compute with exp2_approx */
} quire_sim_counts;

typedef struct {
    uint64_t seed;            /* seed of the order of threads and blocks; 0 keeps the natural order */
    quire_sim_counts* counts; /* filled if not null; only by a library that was built to count */
} quire_sim_options;

QUIRE_SIM_API uint32_t quire_sim_abi(void);
QUIRE_SIM_API size_t quire_sim_kernel_count(void);
/* Kernels are sorted by name; index < quire_sim_kernel_count(). */
QUIRE_SIM_API quire_sim_kernel quire_sim_kernel_at(size_t index);
/* Runs the whole grid before it returns. `args` has a pointer to each argument, as for cuLaunchKernel. Several
   threads may launch at once. */
QUIRE_SIM_API int32_t quire_sim_launch(const char* name, const uint32_t grid[3], const uint32_t block[3],
                                       uint32_t shared_bytes, void* const* args, const quire_sim_options* options);
/* Returns the fault of this thread's last launch. Its texts are valid until this thread's next launch. */
QUIRE_SIM_API quire_sim_fault quire_sim_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
