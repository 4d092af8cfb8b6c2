/* A stand-in: what the build needs to have something to build. */
const char *rows_name_baseline(void);
#ifdef HAS_X86_VARIANTS
const char *rows_name_avx2(void);
const char *rows_name_avx512(void);
#endif

__attribute__((visibility("default"))) int anyk_version(void) { return 0; }
__attribute__((visibility("default"))) int anyk_abi(void) { return 0; }
__attribute__((visibility("default"))) const char *anyk_variant(void) {
#ifdef HAS_X86_VARIANTS
    if (__builtin_cpu_supports("avx512f")) return rows_name_avx512();
    if (__builtin_cpu_supports("avx2")) return rows_name_avx2();
#endif
    return rows_name_baseline();
}
