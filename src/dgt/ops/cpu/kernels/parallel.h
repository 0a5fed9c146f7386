// Threads: one parallel region per call, in which every thread goes through the same steps.
//
// Threads take the pieces of a step from a counter, one at a time, so if the system suspends a thread, the others take
// its share; a step begins when all pieces of the previous step are done. A region can end only when each of its
// threads has run, so there is one region per call instead of one per step: on a busy machine that is one wait instead
// of many.
#pragma once

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "interface.h"
#include "memory.h"
#include "tiles.h"

namespace dgt {

constexpr int MOST_STEPS = 8;  // per region

// State shared by the threads of a region.
struct Team {
    struct Step {
        Counter next;  // the next piece to take
        Counter done;  // number of finished pieces
    };
    Step steps[MOST_STEPS];
    Counter seats;  // assigns thread numbers
};

// One thread's view of the region.
class Member {
public:
    Member(Team& team, int64_t seat) : team_(team), seat_(seat) {}

    int64_t seat() const { return seat_; }

    // Do pieces 0..count together with the other members; returns when all are done.
    template <class Work>
    void share(int64_t count, const Work& work) {
        if (step_ == MOST_STEPS) {
            fprintf(stderr, "dgt: a parallel region has more steps than MOST_STEPS, which is %d\n", MOST_STEPS);
            abort();
        }
        Team::Step& step = team_.steps[step_++];
        int64_t mine = 0;
        for (int64_t i = step.next.add(1); i < count; i = step.next.add(1)) {
            work(i);
            ++mine;
        }
        if (mine) step.done.add(mine);
        for (int turn = 0; step.done.get() < count; ++turn) {
            if (turn > 200) sched_yield();
            else pause();
        }
    }

private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    Team& team_;
    int64_t seat_;
    int step_ = 0;
};

// Run `body(member)` on up to `threads` threads.
template <class Problem, class Body>
void in_parallel(const Problem& problem, int64_t threads, const Body& body) {
    struct Context {
        Team team;
        int64_t threads;
        const Body* body;
    } context;
    context.threads = threads;
    context.body = &body;
    dgt_body enter = [](int64_t begin, int64_t end, void* pointer) {
        Context& shared = *(Context*)pointer;
        for (int64_t i = begin; i < end; ++i) {
            int64_t seat = shared.team.seats.add(1);
            if (seat >= shared.threads) return;
            Member member(shared.team, seat);
            TileUse tiles;
            (*shared.body)(member);
        }
    };
    if (threads > 1) problem.parallel_for(0, threads, 1, enter, &context);
    else enter(0, 1, &context);
}

// The worst status found, visible to all threads.
class Status {
public:
    void raise(dgt_status status) {
        if (get() == DGT_GOOD || status < get()) status_.set(status);
    }
    int get() const { return (int)status_.get(); }

private:
    Counter status_;
};

// The number of threads that a call may use.
template <class Problem>
int64_t thread_count(const Problem& problem) {
    return problem.parallel_for ? max<int64_t>(1, problem.threads) : 1;
}

template <class Problem>
int64_t head_count(const Problem& problem) {
    return problem.images * problem.heads;
}

// Whether threads share the steps of heads, because there are few; else each processes whole heads.
template <class Problem>
bool shares_heads(const Problem& problem) {
    return thread_count(problem) > 1 && head_count(problem) < 4 * thread_count(problem);
}

}  // namespace dgt
