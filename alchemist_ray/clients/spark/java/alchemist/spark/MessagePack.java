package alchemist.spark;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The part of MessagePack that the maps of frames need; Spark ships no library for it. */
final class MessagePack {
    private static final int MAX_DEPTH = 16;

    private MessagePack() {}

    static byte[] pack(Map<String, ?> map) {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        put(out, map);
        return out.toByteArray();
    }

    private static void put(ByteArrayOutputStream out, Object value) {
        if (value instanceof Map) {
            Map<?, ?> map = (Map<?, ?>) value;
            number(out, 0xdf, map.size(), 4);
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                put(out, entry.getKey());
                put(out, entry.getValue());
            }
        } else if (value instanceof List) {
            List<?> list = (List<?>) value;
            number(out, 0xdd, list.size(), 4);
            for (Object item : list) {
                put(out, item);
            }
        } else if (value instanceof String) {
            byte[] text = ((String) value).getBytes(StandardCharsets.UTF_8);
            number(out, 0xdb, text.length, 4);
            out.write(text, 0, text.length);
        } else if (value instanceof byte[]) {
            byte[] bytes = (byte[]) value;
            number(out, 0xc6, bytes.length, 4);
            out.write(bytes, 0, bytes.length);
        } else if (value instanceof Boolean) {
            out.write((Boolean) value ? 0xc3 : 0xc2);
        } else if (value instanceof Integer || value instanceof Long) {
            number(out, 0xd3, ((Number) value).longValue(), 8);
        } else {
            throw new IllegalArgumentException("cannot send a " + value.getClass() + " in a frame");
        }
    }

    private static void number(ByteArrayOutputStream out, int code, long value, int bytes) {
        out.write(code);
        for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
            out.write((int) (value >>> shift));
        }
    }

    /** A map with string keys. */
    static Map<String, Object> unpack(byte[] packed) throws IOException {
        if (packed.length == 0) {
            return new LinkedHashMap<>();
        }
        try {
            Object value = take(ByteBuffer.wrap(packed), 0);
            if (!(value instanceof Map)) {
                throw new IOException("the content of a frame is not a map");
            }
            Map<String, Object> map = new LinkedHashMap<>();
            for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
                map.put(String.valueOf(entry.getKey()), entry.getValue());
            }
            return map;
        } catch (BufferUnderflowException error) {
            throw new IOException("malformed map in a frame");
        }
    }

    private static Object take(ByteBuffer in, int depth) throws IOException {
        if (depth > MAX_DEPTH) {
            throw new IOException("a map in a frame is nested too deeply");
        }
        int code = in.get() & 0xff;
        if (code < 0x80 || code >= 0xe0) {
            return (long) (byte) code;
        }
        if (code < 0x90) {
            return map(in, code & 0x0f, depth);
        }
        if (code < 0xa0) {
            return list(in, code & 0x0f, depth);
        }
        if (code < 0xc0) {
            return text(in, code & 0x1f);
        }
        switch (code) {
            case 0xc0: return null;
            case 0xc2: return false;
            case 0xc3: return true;
            case 0xc4: return bytes(in, in.get() & 0xff);
            case 0xc5: return bytes(in, in.getShort() & 0xffff);
            case 0xc6: return bytes(in, in.getInt());
            case 0xca: return (double) in.getFloat();
            case 0xcb: return in.getDouble();
            case 0xcc: return in.get() & 0xffL;
            case 0xcd: return in.getShort() & 0xffffL;
            case 0xce: return in.getInt() & 0xffffffffL;
            case 0xcf: case 0xd3: return in.getLong();
            case 0xd0: return (long) in.get();
            case 0xd1: return (long) in.getShort();
            case 0xd2: return (long) in.getInt();
            case 0xd9: return text(in, in.get() & 0xff);
            case 0xda: return text(in, in.getShort() & 0xffff);
            case 0xdb: return text(in, in.getInt());
            case 0xdc: return list(in, in.getShort() & 0xffff, depth);
            case 0xdd: return list(in, in.getInt(), depth);
            case 0xde: return map(in, in.getShort() & 0xffff, depth);
            case 0xdf: return map(in, in.getInt(), depth);
            default: throw new IOException("unknown type " + code + " in a frame");
        }
    }

    private static byte[] bytes(ByteBuffer in, int length) throws IOException {
        if (length < 0 || length > in.remaining()) {
            throw new IOException("malformed map in a frame");
        }
        byte[] found = new byte[length];
        in.get(found);
        return found;
    }

    private static String text(ByteBuffer in, int length) throws IOException {
        return new String(bytes(in, length), StandardCharsets.UTF_8);
    }

    private static List<Object> list(ByteBuffer in, int length, int depth) throws IOException {
        List<Object> found = new ArrayList<>();
        for (int k = 0; k != length; k++) {
            found.add(take(in, depth + 1));
        }
        return found;
    }

    private static Map<Object, Object> map(ByteBuffer in, int length, int depth)
            throws IOException {
        Map<Object, Object> found = new LinkedHashMap<>();
        for (int k = 0; k != length; k++) {
            Object key = take(in, depth + 1);
            found.put(key, take(in, depth + 1));
        }
        return found;
    }
}
