/* A stand-in, see anyk.c. */
#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b)
#define TEXT(a) #a
#define WORD(a) TEXT(a)
const char *NAME(rows_name_, VARIANT)(void) { return WORD(VARIANT); }
