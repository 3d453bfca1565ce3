// fiber.h: a stack for every CUDA thread, and the switch from one stack to another.
//
// pyops_host_switch(save, to) pushes only the registers that a function must preserve by the calling convention, stores
// the stack pointer in *save, and continues at the stack pointer `to`.
#pragma once
#include <stdint.h>
#include <string.h>

extern "C" void pyops_host_switch(void** save, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.local pyops_host_switch
.type pyops_host_switch, @function
pyops_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size pyops_host_switch, . - pyops_host_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.local pyops_host_switch
.type pyops_host_switch, %function
pyops_host_switch:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
.size pyops_host_switch, . - pyops_host_switch
)");
#else
#error the host backend knows x86-64 and aarch64
#endif

namespace host {

// Returns the stack pointer of a new fiber, for pyops_host_switch. The fiber starts in `entry`, which must not return.
inline void* new_fiber(char* stack_end, void (*entry)()) {
#if defined(__x86_64__)
    void** frame = reinterpret_cast<void**>(stack_end) - 8;  // six registers, the return address, and padding
    memset(frame, 0, 8 * sizeof(void*));
    frame[6] = reinterpret_cast<void*>(entry);
#else
    void** frame = reinterpret_cast<void**>(stack_end) - 20;
    memset(frame, 0, 20 * sizeof(void*));
    frame[1] = reinterpret_cast<void*>(entry);
#endif
    return frame;
}

}  // namespace host
