/* Lets a process with threads fork in Python before 3.11.10 (github.com/python/cpython/issues/112275).
 *
 * A thread of C++ that enters Python holds the lock of the list of threads for a moment, without the global lock. If another
 * thread forks in that moment, the child waits for this lock for ever, before its first line of Python. Horovod and torch.distributed
 * have such threads, and a DataLoader with workers forks in each epoch. As Python 3.12 does, hold the lock during the fork. */

#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_runtime.h>
#include <pthread.h>

static void acquire(void) { PyThread_acquire_lock(_PyRuntime.interpreters.mutex, WAIT_LOCK); }
static void release(void) { PyThread_release_lock(_PyRuntime.interpreters.mutex); }

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "hpctrain_fork_lock"};

PyMODINIT_FUNC PyInit_hpctrain_fork_lock(void)
{
    if (pthread_atfork(acquire, release, release) != 0)
        return PyErr_NoMemory();
    return PyModule_Create(&definition);
}
