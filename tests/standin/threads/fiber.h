// A function with its own stack that can suspend and resume: one CUDA thread.
//
// On x86-64 a switch saves the six registers that a call must preserve: 2 ns. On other processors
// ucontext switches, with system calls: a hundred times slower.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// void emulation_switch_stack(void** saved, void* next): pushes registers, stores the stack
// pointer, takes the other one, pops registers and returns there. Weak: every translation unit has
// it.
asm(R"(
.pushsection .text
.weak emulation_switch_stack
.hidden emulation_switch_stack
.type emulation_switch_stack, @function
emulation_switch_stack:
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
.size emulation_switch_stack, .-emulation_switch_stack
.popsection
)");
extern "C" void emulation_switch_stack(void** saved, void* next);
#else
#include <ucontext.h>
#endif

namespace emulation {

class Fiber {
 public:
  using Entry = void (*)();  // never returns: it ends in a last suspend()

  // The lowest page stays inaccessible: a stack overflow faults at once.
  Fiber() {
    void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
    mprotect(memory, kGuardBytes, PROT_NONE);
    stack_ = static_cast<char*>(memory) + kGuardBytes;
  }
  ~Fiber() { munmap(stack_ - kGuardBytes, kGuardBytes + kStackBytes); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() begins at `entry`, whatever the fiber did before.
  void start(Entry entry) {
    entry_ = entry;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
#if defined(__x86_64__)
    // The switch reads upwards: six registers, its return address, and the return address of
    // begin(). The stack pointer is 8 past a multiple of 16 in begin(), as after a call.
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&begin);
    for (int i = 0; i < 6; ++i) {
      *--top = nullptr;
    }
    inside_ = static_cast<void*>(top);
#else
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_;
    inside_.uc_stack.ss_size = kStackBytes;
    makecontext(&inside_, &begin, 0);
#endif
  }

  // Called from outside, perhaps by another fiber: runs this fiber until it suspends itself.
  void resume() {
    Fiber* resumer = current_;
    current_ = this;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, stack_, kStackBytes);
#endif
    switch_context(outside_, inside_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
    current_ = resumer;
  }

  // Called from inside: returns at the next resume().
  static void suspend() {
    Fiber* self = current_;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, self->outside_stack_, self->outside_bytes_);
#endif
    switch_context(self->inside_, self->outside_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &self->outside_stack_, &self->outside_bytes_);
#endif
  }

 private:
  static constexpr size_t kStackBytes = 64 * 1024;
  static constexpr size_t kGuardBytes = 4096;

  static void begin() {
    Fiber* self = current_;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &self->outside_stack_, &self->outside_bytes_);
#endif
    self->entry_();
  }

#if defined(__x86_64__)
  using Context = void*;
  static void switch_context(Context& from, Context& to) { emulation_switch_stack(&from, to); }
#else
  using Context = ucontext_t;
  static void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

  static inline Fiber* current_ = nullptr;

  char* stack_;
  Entry entry_;
  Context inside_, outside_;
#if defined(__SANITIZE_ADDRESS__)
  const void* outside_stack_ = nullptr;
  size_t outside_bytes_ = 0;
#endif
};

}  // namespace emulation
