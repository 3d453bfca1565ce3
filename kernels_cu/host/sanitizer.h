// sanitizer.h: the functions that instrumented kernels call at every access to memory, and when a check fails.
//
// Kernels are compiled with the instrumentation of the undefined-behaviour and thread sanitizers but linked with
// neither runtime: the functions below replace theirs.
#pragma once
#include "global.h"

namespace host {

// Data of the undefined-behaviour sanitizer, laid out as the compilers do.
struct SourceLocation {
    const char* file;
    uint32_t line, column;
};
struct TypeDescriptor {
    uint16_t kind, info;
    char name[1];
};
struct TypeMismatch {
    SourceLocation location;
    const TypeDescriptor* type;
    uint8_t log_alignment, kind;
};

[[noreturn]] inline void
raise_check(const char* kind, const SourceLocation& location, const void* pc, const char* message) {
    raise_fault(kind, {location.file, int(location.line), pc, nullptr}, "%s", message);
}

inline void check_alignment(const void* address, size_t bytes, const void* pc) {
    if (reinterpret_cast<uintptr_t>(address) % (bytes < 8 ? bytes : 8)) {
        raise_fault("misaligned access", {nullptr, 0, pc}, "%zu bytes at %p", bytes, address);
    }
}

}  // namespace host

#define HOOK extern "C" HOST_API
#define CHECK(NAME, KIND, MESSAGE, ...)                                                                         \
    HOOK [[noreturn]] void __ubsan_handle_##NAME##_abort(const host::SourceLocation* location, ##__VA_ARGS__) { \
        host::raise_check(KIND, *location, __builtin_return_address(0), MESSAGE);                               \
    }

CHECK(shift_out_of_bounds, "undefined shift", "shift by a negative count, or by the width or more", uintptr_t,
      uintptr_t)
CHECK(divrem_overflow, "integer division by zero", "or a quotient that does not fit", uintptr_t, uintptr_t)
CHECK(float_cast_overflow, "undefined conversion", "the float does not fit into the integer type", uintptr_t)
CHECK(add_overflow, "integer overflow", "signed addition", uintptr_t, uintptr_t)
CHECK(sub_overflow, "integer overflow", "signed subtraction", uintptr_t, uintptr_t)
CHECK(mul_overflow, "integer overflow", "signed multiplication", uintptr_t, uintptr_t)
CHECK(negate_overflow, "integer overflow", "signed negation", uintptr_t)

HOOK [[noreturn]] void __ubsan_handle_out_of_bounds_abort(const host::SourceLocation* location, uintptr_t index) {
    host::raise_fault("out-of-bounds array index", {location->file, int(location->line), __builtin_return_address(0)},
                      "index %lld", static_cast<long long>(index));
}

HOOK [[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const host::TypeMismatch* check, uintptr_t address) {
    const host::Where where = {check->location.file, int(check->location.line), __builtin_return_address(0)};
    const size_t alignment = size_t(1) << check->log_alignment;
    if (address % alignment == 0) host::raise_fault("out-of-bounds access", where, "of an object at %#zx", address);
    host::raise_fault("misaligned access", where, "address %#zx of %s, expected a multiple of %zu", address,
                      check->type->name, alignment);
}

// The compilers call the names without "unaligned" where they assume alignment, of at most eight bytes.
#define ACCESS(NAME, BYTES, ALIGNMENT, KIND)                        \
    HOOK void __tsan_##NAME(void* address) {                        \
        const void* pc = __builtin_return_address(0);               \
        host::check_alignment(address, ALIGNMENT, pc);              \
        host::check_access(address, BYTES, host::Access::KIND, pc); \
    }
#define ACCESSES(BYTES)                           \
    ACCESS(read##BYTES, BYTES, BYTES, READ)       \
    ACCESS(write##BYTES, BYTES, BYTES, WRITE)     \
    ACCESS(unaligned_read##BYTES, BYTES, 1, READ) \
    ACCESS(unaligned_write##BYTES, BYTES, 1, WRITE)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_read_range(void* address, size_t bytes) {
    host::check_access(address, bytes, host::Access::READ, __builtin_return_address(0));
}
HOOK void __tsan_write_range(void* address, size_t bytes) {
    host::check_access(address, bytes, host::Access::WRITE, __builtin_return_address(0));
}
HOOK void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    host::check_access(from, bytes, host::Access::READ, __builtin_return_address(0));
    host::check_access(to, bytes, host::Access::WRITE, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}
HOOK void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    host::check_access(from, bytes, host::Access::READ, __builtin_return_address(0));
    host::check_access(to, bytes, host::Access::WRITE, __builtin_return_address(0));
    return memmove(to, from, bytes);
}
HOOK void* __tsan_memset(void* to, int value, size_t bytes) {
    host::check_access(to, bytes, host::Access::WRITE, __builtin_return_address(0));
    return memset(to, value, bytes);
}
#undef ACCESSES
#undef ACCESS
#undef CHECK
#undef HOOK
