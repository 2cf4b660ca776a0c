package alchemist.spark;

import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
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

    static byte[] pack(Map<String, ?> map) throws IOException {
        ByteArrayOutputStream packed = new ByteArrayOutputStream();
        put(new DataOutputStream(packed), map);
        return packed.toByteArray();
    }

    private static void put(DataOutputStream out, Object value) throws IOException {
        if (value instanceof Map) {
            head(out, 0xdf, ((Map<?, ?>) value).size());
            for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
                put(out, entry.getKey());
                put(out, entry.getValue());
            }
        } else if (value instanceof List) {
            head(out, 0xdd, ((List<?>) value).size());
            for (Object item : (List<?>) value) {
                put(out, item);
            }
        } else if (value instanceof String) {
            byte[] text = ((String) value).getBytes(StandardCharsets.UTF_8);
            head(out, 0xdb, text.length);
            out.write(text);
        } else if (value instanceof byte[]) {
            head(out, 0xc6, ((byte[]) value).length);
            out.write((byte[]) value);
        } else if (value instanceof Boolean) {
            out.write((Boolean) value ? 0xc3 : 0xc2);
        } else {
            out.write(0xd3);
            out.writeLong(((Number) value).longValue());
        }
    }

    private static void head(DataOutputStream out, int code, int length) throws IOException {
        out.write(code);
        out.writeInt(length);
    }

    @SuppressWarnings("unchecked")
    static Map<String, Object> unpack(byte[] packed) throws IOException {
        if (packed.length == 0) {
            return new LinkedHashMap<>();
        }
        try {
            Object value = take(ByteBuffer.wrap(packed), 0);
            if (value instanceof Map) {
                return (Map<String, Object>) value;
            }
            throw new IOException("the content of a frame is not a map");
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
            case 0xc4: case 0xc5: case 0xc6: return bytes(in, number(in, 1 << code - 0xc4));
            case 0xca: return (double) in.getFloat();
            case 0xcb: return in.getDouble();
            case 0xcc: case 0xcd: case 0xce: case 0xcf: return number(in, 1 << code - 0xcc);
            case 0xd0: return (long) in.get();
            case 0xd1: return (long) in.getShort();
            case 0xd2: return (long) in.getInt();
            case 0xd3: return in.getLong();
            case 0xd9: case 0xda: case 0xdb: return text(in, number(in, 1 << code - 0xd9));
            case 0xdc: case 0xdd: return list(in, number(in, 2 << code - 0xdc), depth);
            case 0xde: case 0xdf: return map(in, number(in, 2 << code - 0xde), depth);
            default: throw new IOException("unknown type " + code + " in a frame");
        }
    }

    /** An unsigned number of so many bytes. */
    private static long number(ByteBuffer in, int nbytes) {
        long found = 0;
        for (int k = 0; k < nbytes; k++) {
            found = found << 8 | in.get() & 0xff;
        }
        return found;
    }

    private static byte[] bytes(ByteBuffer in, long length) {
        if (length > in.remaining()) {
            throw new BufferUnderflowException();
        }
        byte[] found = new byte[(int) length];
        in.get(found);
        return found;
    }

    private static String text(ByteBuffer in, long length) {
        return new String(bytes(in, length), StandardCharsets.UTF_8);
    }

    private static List<Object> list(ByteBuffer in, long length, int depth) throws IOException {
        List<Object> found = new ArrayList<>();
        for (long k = 0; k < length; k++) {
            found.add(take(in, depth + 1));
        }
        return found;
    }

    private static Map<String, Object> map(ByteBuffer in, long length, int depth)
            throws IOException {
        Map<String, Object> found = new LinkedHashMap<>();
        for (long k = 0; k < length; k++) {
            String key = String.valueOf(take(in, depth + 1));
            found.put(key, take(in, depth + 1));
        }
        return found;
    }
}
