/* The black box's ring of records in C: does what titan_ckpt.debug.record.ring does in Python, in a third of the time.

   Optional: the package installs and works without a compiler. Uses only CPython's public C API. The record layout is
   titan_ckpt.debug.incident.black_box.RECORD. Calls Python for whatever happens once per group, dtype, call site or
   code object. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if PY_BIG_ENDIAN || defined(Py_GIL_DISABLED)
#error "records are little-endian, and the interpreter's lock guards the ring"
#endif

enum { NO_DTYPE = 0xFFFF, RAISED = 2, ENDED_AT = 8, OUTCOME_AT = 43, CODE_ONLY = -2, INSIDE = 1, OUTSIDE = 2 };

typedef struct {
    int64_t created, ended, elements;
    int32_t seq, site;
    uint64_t what;
    uint32_t kind, number;
} Record; /* 48 bytes without padding */

/* A code object (at == CODE_ONLY; value INSIDE or OUTSIDE), or a place in the code of two frames (value: its site). */
typedef struct {
    const void *code, *outer;
    int at, outer_at, value;
} Entry;

typedef struct {
    PyObject_HEAD
    Py_buffer map;
    Py_ssize_t header, capacity;
    unsigned long long count;
    long long ended_ns;
    PyObject *names, *dtypes, *pending;
    const void *last_work;
    Py_ssize_t last_at;
    Entry *table;
    size_t slots, used;
} Ring;

static PyObject *s_numel, *s_dtype, *s_counted, *s_ahead, *s_shifted_place, *s_add_code, *s_add_site, *s_add_dtype, *s_add_group;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- the table of code objects and sites: open addressing, doubled when half full ---- */

static Entry *probe(Entry *table, size_t slots, const void *code, int at, const void *outer, int outer_at) {
    uint64_t hash = ((uintptr_t)code >> 4) * 0x9E3779B97F4A7C15u ^ ((uintptr_t)outer >> 4) * 0xC2B2AE3D27D4EB4Fu;
    hash ^= ((uint64_t)(uint32_t)at << 20 ^ (uint32_t)outer_at) * 0x165667B19E3779F9u;
    for (size_t i = (hash ^ hash >> 32) & (slots - 1);; i = (i + 1) & (slots - 1)) {
        Entry *entry = &table[i];
        if (!entry->value || (entry->code == code && entry->at == at && entry->outer == outer && entry->outer_at == outer_at))
            return entry;
    }
}

static int lookup(Ring *ring, const void *code, int at, const void *outer, int outer_at) {
    return probe(ring->table, ring->slots, code, at, outer, outer_at)->value;
}

static int grow(Ring *ring) {
    size_t slots = ring->slots ? ring->slots * 2 : 1024;
    Entry *table = PyMem_Calloc(slots, sizeof(Entry));
    if (!table) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < ring->slots; i++) {
        Entry *old = &ring->table[i];
        if (old->value)
            *probe(table, slots, old->code, old->at, old->outer, old->outer_at) = *old;
    }
    PyMem_Free(ring->table);
    ring->table = table;
    ring->slots = slots;
    return 0;
}

static int remember(Ring *ring, const void *code, int at, const void *outer, int outer_at, int value) {
    if (2 * (ring->used + 1) > ring->slots && grow(ring) < 0)
        return -1;
    Entry *entry = probe(ring->table, ring->slots, code, at, outer, outer_at);
    ring->used += !entry->value;
    *entry = (Entry){code, outer, at, outer_at, value};
    return 0;
}

/* ---- calls into Python ---- */

/* names.<method>(argument) as a number; -1 with an exception. */
static int ask(Ring *ring, PyObject *method, PyObject *argument) {
    if (!ring->names) {
        PyErr_SetString(PyExc_RuntimeError, "the ring is closed");
        return -1;
    }
    PyObject *answer = PyObject_CallMethodOneArg(ring->names, method, argument);
    if (!answer)
        return -1;
    long number = PyLong_AsLong(answer);
    Py_DECREF(answer);
    return number == -1 && PyErr_Occurred() ? -1 : (int)number;
}

/* INSIDE where the code is torch's or ours, OUTSIDE where it is the user's; -1 with an exception. */
static int side_of(Ring *ring, PyCodeObject *code) {
    int side = lookup(ring, code, CODE_ONLY, NULL, 0);
    if (side)
        return side;
    int is_inside = ask(ring, s_add_code, (PyObject *)code); /* keeps the code alive, so its address is not reused */
    if (is_inside < 0)
        return -1;
    side = is_inside ? INSIDE : OUTSIDE;
    return remember(ring, code, CODE_ONLY, NULL, 0, side) < 0 ? -1 : side;
}

/* The site of the first frame outwards that is the user's; Python numbers a new one. -1 with an exception. */
static int find_site(Ring *ring) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (!frame)
        return 0;
    Py_INCREF(frame);
    for (;;) {
        PyFrameObject *outer = PyFrame_GetBack(frame);
        PyCodeObject *code = PyFrame_GetCode(frame);
        int side = side_of(ring, code);
        Py_DECREF(code);
        if (side == INSIDE && outer) {
            Py_SETREF(frame, outer);
            continue;
        }
        int site = -1;
        if (side > 0) {
            PyCodeObject *around = outer ? PyFrame_GetCode(outer) : NULL;
            int at = PyFrame_GetLasti(frame), outer_at = outer ? PyFrame_GetLasti(outer) : 0;
            site = lookup(ring, code, at, around, outer_at);
            if (!site) {
                site = ask(ring, s_add_site, (PyObject *)frame);
                if (site > 0 && remember(ring, code, at, around, outer_at, site) < 0)
                    site = -1;
            }
            Py_XDECREF(around);
        }
        Py_XDECREF(outer);
        Py_DECREF(frame);
        return site;
    }
}

/* Elements and dtype of the first tensor in `tensors`; -1 with an exception. */
static int describe(Ring *ring, PyObject *tensors, int64_t *elements, uint32_t *kind) {
    while (PyList_CheckExact(tensors) || PyTuple_CheckExact(tensors)) {
        if (!PySequence_Fast_GET_SIZE(tensors)) {
            tensors = Py_None;
            break;
        }
        tensors = PySequence_Fast_GET_ITEM(tensors, 0);
    }
    *elements = -1;
    if (tensors == Py_None) {
        *kind |= NO_DTYPE;
        return 0;
    }
    Py_INCREF(tensors); /* a list may change during calls into Python */
    PyObject *numel = PyObject_CallMethodNoArgs(tensors, s_numel);
    PyObject *dtype = numel ? PyObject_GetAttr(tensors, s_dtype) : NULL;
    Py_DECREF(tensors);
    int index = -1;
    if (dtype) {
        *elements = PyLong_AsLongLong(numel);
        PyObject *known = PyErr_Occurred() ? NULL : PyDict_GetItemWithError(ring->dtypes, dtype);
        index = known ? (int)PyLong_AsLong(known) : PyErr_Occurred() ? -1 : ask(ring, s_add_dtype, dtype);
    }
    Py_XDECREF(numel);
    Py_XDECREF(dtype);
    *kind |= (uint32_t)index & NO_DTYPE;
    return index < 0 ? -1 : 0;
}

/* ---- records ---- */

/* Writes one record. Returns the offset of its end time, 0 when the ring is closed, -1 with an exception. */
static Py_ssize_t write_record(Ring *ring, int32_t seq, uint64_t what, uint32_t kind, PyObject *tensors) {
    int64_t elements;
    if (!ring->map.buf)
        return 0;
    int site = describe(ring, tensors, &elements, &kind) < 0 ? -1 : find_site(ring);
    if (!ring->map.buf) { /* closed by another thread during a call into Python: not an error for the caller */
        PyErr_Clear();
        return 0;
    }
    if (site < 0)
        return -1;
    Py_ssize_t start = ring->header + (Py_ssize_t)(ring->count % (unsigned long long)ring->capacity) * (Py_ssize_t)sizeof(Record);
    ring->count++;
    Record record = {now_ns(), 0, elements, seq, site, what, kind, (uint32_t)ring->count};
    memcpy((char *)ring->map.buf + start, &record, sizeof record);
    return start + ENDED_AT;
}

static void write_end(Ring *ring, Py_ssize_t at) {
    if (at <= 0 || !ring->map.buf || at + 8 > ring->map.len)
        return;
    ring->ended_ns = now_ns();
    memcpy((char *)ring->map.buf + at, &ring->ended_ns, 8);
}

/* Keeps the newest work outside the table of pending works: most are waited for immediately. */
static int await(Ring *ring, const void *work, Py_ssize_t at) {
    if (ring->last_work && ring->last_work != work) {
        PyObject *key = PyLong_FromVoidPtr((void *)ring->last_work), *value = PyLong_FromSsize_t(ring->last_at);
        int failed = !key || !value || PyDict_SetItem(ring->pending, key, value) < 0;
        Py_XDECREF(key);
        Py_XDECREF(value);
        if (failed)
            return -1;
    }
    ring->last_work = work;
    ring->last_at = at;
    return 0;
}

static PyObject *ring_record(Ring *ring, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "record takes 4 arguments, got %zd", nargs);
    long seq = PyLong_AsLong(args[0]);
    uint64_t what = PyLong_AsUnsignedLongLongMask(args[1]);
    uint32_t kind = (uint32_t)PyLong_AsUnsignedLongMask(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t at = write_record(ring, (int32_t)seq, what, kind, args[3]);
    return at < 0 ? NULL : PyLong_FromSsize_t(at);
}

static PyObject *ring_await(Ring *ring, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "await_ takes 2 arguments, got %zd", nargs);
    Py_ssize_t at = PyLong_AsSsize_t(args[1]);
    if ((at == -1 && PyErr_Occurred()) || await(ring, args[0], at) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *ring_take(Ring *ring, PyObject *work) {
    if (ring->last_work == work) {
        ring->last_work = NULL;
        return PyLong_FromSsize_t(ring->last_at);
    }
    PyObject *key = PyLong_FromVoidPtr(work), *value = key ? PyDict_GetItemWithError(ring->pending, key) : NULL;
    Py_XINCREF(value);
    if (value && PyDict_DelItem(ring->pending, key) < 0)
        Py_CLEAR(value);
    Py_XDECREF(key);
    return value ? value : PyErr_Occurred() ? NULL : PyLong_FromLong(0);
}

static PyObject *ring_ended(Ring *ring, PyObject *place) {
    Py_ssize_t at = PyLong_AsSsize_t(place);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    write_end(ring, at);
    Py_RETURN_NONE;
}

static PyObject *ring_raised(Ring *ring, PyObject *place) {
    Py_ssize_t at = PyLong_AsSsize_t(place);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    if (at > 0 && ring->map.buf && at + OUTCOME_AT - ENDED_AT < ring->map.len)
        ((char *)ring->map.buf)[at + OUTCOME_AT - ENDED_AT] = RAISED;
    write_end(ring, at);
    Py_RETURN_NONE;
}

static PyObject *ring_forget(Ring *ring, PyObject *Py_UNUSED(ignored)) {
    memset(ring->table, 0, ring->slots * sizeof(Entry));
    ring->used = 0;
    Py_RETURN_NONE;
}

static PyObject *ring_close(Ring *ring, PyObject *Py_UNUSED(ignored)) {
    if (ring->map.buf)
        PyBuffer_Release(&ring->map);
    ring->map.buf = NULL;
    Py_CLEAR(ring->names);
    PyDict_Clear(ring->pending);
    ring->last_work = NULL;
    Py_RETURN_NONE;
}

/* ---- a collective of ProcessGroup, wrapped ---- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Ring *ring;
    PyObject *original, *groups;
    uint64_t what;
    Py_ssize_t argument;
} Collective;

/* The group's next number and its place in `what`; -1 with an exception. */
static int ask_group(Collective *self, PyObject *group, int32_t *seq, uint64_t *place) {
    PyObject *known = PyDict_GetItemWithError(self->groups, group);
    Py_XINCREF(known);
    if (!known && !PyErr_Occurred() && self->ring->names)
        known = PyObject_CallMethodOneArg(self->ring->names, s_add_group, group);
    if (!known)
        return -1;
    PyObject *counted = PyObject_GetAttr(known, s_counted), *number = counted ? PyObject_CallNoArgs(counted) : NULL;
    PyObject *ahead = number ? PyObject_GetAttr(known, s_ahead) : NULL;
    PyObject *shifted = ahead ? PyObject_GetAttr(known, s_shifted_place) : NULL;
    if (shifted) {
        *seq = (int32_t)(PyLong_AsLongLong(number) + PyLong_AsLongLong(ahead));
        *place = PyLong_AsUnsignedLongLong(shifted);
    }
    Py_DECREF(known);
    Py_XDECREF(counted);
    Py_XDECREF(number);
    Py_XDECREF(ahead);
    Py_XDECREF(shifted);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *collective_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *names) {
    Collective *self = (Collective *)callable;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf), at = 0;
    if (self->ring->map.buf && nargs > 0) {
        int32_t seq = 0;
        uint64_t place = 0;
        int is_given = self->argument >= 0 && self->argument + 1 < nargs;
        if (ask_group(self, args[0], &seq, &place) == 0)
            at = write_record(self->ring, seq, self->what | place, 0, is_given ? args[self->argument + 1] : Py_None);
        else if (self->ring->map.buf)
            return NULL;
        else
            PyErr_Clear(); /* closed meanwhile, as above */
        if (at < 0)
            return NULL;
    }
    PyObject *work = PyObject_Vectorcall(self->original, args, nargsf, names);
    if (work == Py_None)
        write_end(self->ring, at);
    else if (work && at && await(self->ring, work, at) < 0)
        Py_CLEAR(work);
    return work;
}

static PyObject *collective_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner)) {
    return instance ? PyMethod_New(self, instance) : Py_NewRef(self);
}

static void collective_dealloc(Collective *self) {
    Py_XDECREF(self->ring);
    Py_XDECREF(self->original);
    Py_XDECREF(self->groups);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject CollectiveType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "titan_ckpt.debug.record._ring.Collective",
    .tp_basicsize = sizeof(Collective),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Collective, call),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = collective_get,
    .tp_dealloc = (destructor)collective_dealloc,
    .tp_doc = "A method of ProcessGroup that writes a record before it calls the original.",
};

static PyObject *ring_collective(Ring *ring, PyObject *args) {
    PyObject *original, *groups;
    unsigned long long what;
    Py_ssize_t argument;
    if (!PyArg_ParseTuple(args, "OKnO!", &original, &what, &argument, &PyDict_Type, &groups))
        return NULL;
    Collective *made = PyObject_New(Collective, &CollectiveType);
    if (!made)
        return NULL;
    made->call = collective_call;
    made->ring = (Ring *)Py_NewRef(ring);
    made->original = Py_NewRef(original);
    made->groups = Py_NewRef(groups);
    made->what = what;
    made->argument = argument;
    return (PyObject *)made;
}

/* ---- the type and the module ---- */

static int ring_init(Ring *ring, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"map", "header", "capacity", "names", "dtypes", NULL};
    PyObject *map, *names, *dtypes;
    if (ring->dtypes) {
        PyErr_SetString(PyExc_RuntimeError, "the ring is made already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OnnOO!", keywords, &map, &ring->header, &ring->capacity, &names, &PyDict_Type, &dtypes))
        return -1;
    if (PyObject_GetBuffer(map, &ring->map, PyBUF_WRITABLE) < 0)
        return -1;
    if (ring->header < 0 || ring->capacity < 1 ||
        ring->capacity > (ring->map.len - ring->header) / (Py_ssize_t)sizeof(Record)) {
        PyErr_Format(PyExc_ValueError, "%zd records do not fit into %zd bytes", ring->capacity, ring->map.len);
        return -1;
    }
    ring->names = Py_NewRef(names);
    ring->dtypes = Py_NewRef(dtypes);
    ring->pending = PyDict_New();
    return ring->pending ? grow(ring) : -1;
}

static void ring_dealloc(Ring *ring) {
    if (ring->map.buf)
        PyBuffer_Release(&ring->map);
    Py_XDECREF(ring->names);
    Py_XDECREF(ring->dtypes);
    Py_XDECREF(ring->pending);
    PyMem_Free(ring->table);
    Py_TYPE(ring)->tp_free(ring);
}

static PyMethodDef ring_methods[] = {
    {"record", (PyCFunction)(void (*)(void))ring_record, METH_FASTCALL, "Write a record of the calling frame's site; the place of its end."},
    {"await_", (PyCFunction)(void (*)(void))ring_await, METH_FASTCALL, "Know the place of a work's end until it is taken."},
    {"take", (PyCFunction)ring_take, METH_O, "The place of a work's end, 0 where none is known."},
    {"ended", (PyCFunction)ring_ended, METH_O, "Write the end of a record."},
    {"raised", (PyCFunction)ring_raised, METH_O, "Write the end of a record whose operation raised."},
    {"forget", (PyCFunction)ring_forget, METH_NOARGS, "Forget code objects and sites."},
    {"close", (PyCFunction)ring_close, METH_NOARGS, "Let the map go; what is recorded later is dropped."},
    {"collective", (PyCFunction)ring_collective, METH_VARARGS, "Wrap a method of ProcessGroup: original, what, argument, groups."},
    {NULL},
};

static PyMemberDef ring_members[] = {
    {"count", T_ULONGLONG, offsetof(Ring, count), READONLY, "Operations so far."},
    {"ended_ns", T_LONGLONG, offsetof(Ring, ended_ns), READONLY, "When the last operation ended, in ns since the epoch."},
    {NULL},
};

static PyTypeObject RingType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "titan_ckpt.debug.record._ring.Ring",
    .tp_basicsize = sizeof(Ring),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)ring_init,
    .tp_dealloc = (destructor)ring_dealloc,
    .tp_methods = ring_methods,
    .tp_members = ring_members,
    .tp_doc = "The ring of records of a black box; see titan_ckpt.debug.record.ring.Ring.",
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ring", "The black box's ring of records.", -1, NULL};

PyMODINIT_FUNC PyInit__ring(void) {
    struct {
        PyObject **place;
        const char *text;
    } texts[] = {{&s_numel, "numel"}, {&s_dtype, "dtype"}, {&s_counted, "counted"}, {&s_ahead, "ahead"},
                 {&s_shifted_place, "shifted_place"}, {&s_add_code, "add_code"}, {&s_add_site, "add_site"},
                 {&s_add_dtype, "add_dtype"}, {&s_add_group, "add_group"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].place = PyUnicode_InternFromString(texts[i].text)))
            return NULL;
    if (PyType_Ready(&RingType) < 0 || PyType_Ready(&CollectiveType) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "Ring", (PyObject *)&RingType) < 0)
        Py_CLEAR(made);
    return made;
}
