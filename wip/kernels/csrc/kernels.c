/* The kernels, compiled once for each instruction set, whose name is VARIANT: losses and their gradients, the best classes, masks,
   ranks, sorts and draws of rows of scores. What is computed is what the plain code in anyk/operators, anyk/losses.py and
   anyk/baselines.py defines; the formulae are explained there. */
#include "anyk.h"
#include "_vector.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

/* Memory from which parts are taken one after the other. Without memory, only how much the parts take is counted: the same code
   tells the size and then lays the parts out. */
typedef struct {
    char *memory;
    int64_t used;
} Arena;

static void *take(Arena *arena, int64_t bytes) {
    char *start = arena->memory ? arena->memory + arena->used : NULL;
    arena->used += (bytes + 63) & ~(int64_t)63;
#if defined(__SANITIZE_ADDRESS__) /* the gaps between the parts belong to nobody */
    arena->used += 64;
    if (start) {
        __asan_unpoison_memory_region(start, (size_t)bytes);
        __asan_poison_memory_region(start + bytes, (size_t)(arena->memory + arena->used - start - bytes));
    }
#endif
    return start;
}

/* Works on rows with memory that is laid out for them. Returns a Status. */
static int with_memory(void (*lay_out)(void *work, Arena *arena), int (*run)(void *work, int64_t first, int64_t last), void *work,
                       int64_t first, int64_t last) {
    Arena arena = {0};
    lay_out(work, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    lay_out(work, &arena);
    int status = run(work, first, last);
    give_memory_back(arena.memory);
    return status;
}

#include "_rows.h"
#include "_select.h"
#include "_operators.h"
#include "_network.h"
#include "_loss.h"
#include "_masks.h"
#include "_subset.h"
#include "_order.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
const Variant JOIN(variant_, VARIANT) = {TEXT(VARIANT), forward, backward, best, mask, mask_backward, draw, order, network_mask};
