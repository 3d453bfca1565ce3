// runtime.cpp: the library that runs kernels on the host: signals, the time limit, and pyops_host_run, which Python
// calls.
//
// It is compiled once, without the instrumentation of kernels.
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include "sanitizer.h"

namespace host {

Index thread_index() { return state.current->index; }
Index block_index() { return state.block; }
Index block_size() { return state.launch.block; }
Index grid_size() { return state.launch.grid; }
unsigned lane_index() { return state.current->lane; }

void fail(const char* kind, const char* message, const char* file, int line) {
    raise_fault(kind, {file, line, __builtin_return_address(0)}, "%s", message);
}

// Signals that a faulty kernel may cause, and the signal of the timer that limits a launch.
const int TIME_IS_OVER = SIGRTMIN + 5;
const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, TIME_IS_OVER};
constexpr int NUM_SIGNALS = sizeof SIGNALS / sizeof SIGNALS[0];
inline struct sigaction previous_actions[NUM_SIGNALS];
inline pid_t launching_thread;

inline pid_t this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// The address after the faulting instruction, and its access: "read" or "write".
struct Machine {
    const void* pc;
    const char* verb;
};
inline Machine machine_state(void* context) {
    const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    const char* verb = machine.gregs[REG_ERR] & 2 ? "write" : "read";
    return {reinterpret_cast<void*>(machine.gregs[REG_RIP] + 1), verb};
#else
    return {reinterpret_cast<void*>(machine.pc + 4), "access"};
#endif
}

inline void on_signal(int signal, siginfo_t* info, void* context) {
    if (!state.running || this_thread() != launching_thread) {  // no kernel is the cause: restore previous handlers
        for (int i = 0; i < NUM_SIGNALS; ++i) {
            if (SIGNALS[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
        }
        if (signal == TIME_IS_OVER) raise(signal);
        return;  // the instruction runs again, and the previous handler gets the signal
    }
    const Machine machine = machine_state(context);
    const Where where = {nullptr, 0, machine.pc, nullptr};
    const char* address = static_cast<char*>(info->si_addr);
    if (signal == TIME_IS_OVER) {
        raise_fault("time limit", where, "still running after %u ms", state.launch.time_limit_ms);
    }
    if (signal == SIGFPE) raise_fault("integer division by zero", where, "or a quotient that does not fit");
    if (signal == SIGILL) raise_fault("trap", where, "the kernel stopped itself");
    if (signal == SIGSEGV && info->si_code == SI_KERNEL) {  // x86 gives no address here
        raise_fault("misaligned access", where, "%s by a vector instruction, or at what is no address", machine.verb);
    }
    if (in_arena(address)) {
        raise_fault("out-of-bounds shared access", where, "%s beside shared memory", machine.verb);
    }
    if (address >= scheduler.stacks && address < scheduler.stacks + STACK_BYTES * scheduler.capacity) {
        raise_fault("stack overflow", where, "local arrays take more than %zu KiB", STACK_BYTES / 1024);
    }
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    raise_fault("out-of-bounds global access", {nullptr, 0, machine.pc, nullptr, at}, "%s at 0x%zx", machine.verb,
                size_t(at));
}

// Handles the signals and limits the time, from construction to destruction.
struct Watch {
    stack_t previous_stack;
    timer_t timer;
    bool has_timer;
    sigset_t previous_mask;

    Watch() {
        alignas(16) static char stack[64 * 1024];
        stack_t own = {};
        own.ss_sp = stack;
        own.ss_size = sizeof stack;
        sigaltstack(&own, &previous_stack);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigset_t taken;
        sigemptyset(&taken);
        for (int i = 0; i < NUM_SIGNALS; ++i) {
            sigaction(SIGNALS[i], &action, &previous_actions[i]);
            sigaddset(&taken, SIGNALS[i]);
        }
        pthread_sigmask(SIG_UNBLOCK, &taken, &previous_mask);
        sigevent event = {};
        event.sigev_notify = 4;  // SIGEV_THREAD_ID
        event.sigev_signo = TIME_IS_OVER;
        event._sigev_un._tid = launching_thread;
        has_timer = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
        const uint32_t limit = state.launch.time_limit_ms;
        itimerspec when = {};
        when.it_value = {time_t(limit / 1000), long(limit % 1000) * 1000000};
        if (has_timer) timer_settime(timer, 0, &when, nullptr);
    }
    ~Watch() {
        if (has_timer) timer_delete(timer);
        for (int i = 0; i < NUM_SIGNALS; ++i) sigaction(SIGNALS[i], &previous_actions[i], nullptr);
        pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
        sigaltstack(&previous_stack, nullptr);
    }
};

}  // namespace host

// Runs a kernel. Returns the fault that ended the launch, or null.
extern "C" HOST_API const host::Fault*
pyops_host_run(void (*entry)(void**), void** parameters, const host::Launch* launch) {
    using namespace host;
    state.launch = *launch;
    ++state.launch_number;
    state.entry = entry;
    state.parameters = parameters;
    state.current = nullptr;
    state.asked_pc = nullptr;
    state.block = {};
    state.rank = 0;
    state.num_waiting = 0;
    enter_threads(0);
    launching_thread = this_thread();
    const Fault* fault = nullptr;
    if (sigsetjmp(state.escape, 1) == 0) {
        if (num_threads() == 0 || num_threads() > MAX_THREADS) {
            raise_fault("bad launch", {}, "a block has 1 to %u threads", MAX_THREADS);
        }
        if (launch->shared_bytes > DYNAMIC_BYTES) raise_fault("bad launch", {}, "more than 256 KiB of shared memory");
        if (launch->cluster > MAX_CLUSTER || (launch->grid.y % launch->cluster && !launch->num_ranks)) {
            raise_fault("bad launch", {}, "%u blocks in y, clusters of %u", launch->grid.y, launch->cluster);
        }
        renew_epochs();
        if (!memory_init(launch->cluster) || !stacks_init(num_threads() * launch->cluster)) {
            raise_fault("bad launch", {}, "out of memory");
        }
#if PYOPS_HOST_CLOCKED
        if (!clocks_init() || !cells_init()) raise_fault("bad launch", {}, "out of memory");
#endif
    } else {
        return &state.fault;
    }
    memory_begin_launch();
    global_begin_launch();
    const Watch watch;
    if (sigsetjmp(state.escape, 1) == 0) {
        state.running = true;
        run_grid();
    } else {
        fault = &state.fault;
    }
    state.running = false;
    state.current = nullptr;
    return fault;
}
