package alchemist.spark

import java.io.{ByteArrayOutputStream, DataOutputStream, IOException}
import java.nio.{BufferUnderflowException, ByteBuffer}
import java.nio.charset.StandardCharsets.UTF_8

/** The part of MessagePack that the maps of frames need; Spark ships no library for it. */
private[spark] object MessagePack {
  private val MAX_DEPTH = 16

  def pack(map: Map[String, Any]): Array[Byte] = {
    val packed = new ByteArrayOutputStream
    put(new DataOutputStream(packed), map)
    packed.toByteArray
  }

  private def put(out: DataOutputStream, value: Any): Unit = {
    def head(code: Int, length: Int): Unit = {
      out.write(code)
      out.writeInt(length)
    }
    value match {
      case map: Map[_, _] =>
        head(0xdf, map.size)
        map.foreach { case (key, item) => put(out, key); put(out, item) }
      case items: Seq[_] =>
        head(0xdd, items.size)
        items.foreach(put(out, _))
      case text: String =>
        val bytes = text.getBytes(UTF_8)
        head(0xdb, bytes.length)
        out.write(bytes)
      case bytes: Array[Byte] =>
        head(0xc6, bytes.length)
        out.write(bytes)
      case flag: Boolean => out.write(if (flag) 0xc3 else 0xc2)
      case number: Number =>
        out.write(0xd3)
        out.writeLong(number.longValue)
    }
  }

  def unpack(packed: Array[Byte]): Map[String, Any] =
    try {
      if (packed.isEmpty) Map.empty else take(ByteBuffer.wrap(packed), 0) match {
        case map: Map[_, _] => map.asInstanceOf[Map[String, Any]]
        case _ => throw new IOException("the content of a frame is not a map")
      }
    } catch {
      case _: BufferUnderflowException => throw new IOException("malformed map in a frame")
    }

  private def take(in: ByteBuffer, depth: Int): Any = {
    if (depth > MAX_DEPTH) throw new IOException("a map in a frame is nested too deeply")
    def list(length: Long): List[Any] = times(length, take(in, depth + 1))
    def map(length: Long): Map[String, Any] =
      times(length, String.valueOf(take(in, depth + 1)) -> take(in, depth + 1)).toMap
    in.get & 0xff match {
      case code if code < 0x80 || code >= 0xe0 => code.toByte.toLong
      case code if code < 0x90 => map(code & 0x0f)
      case code if code < 0xa0 => list(code & 0x0f)
      case code if code < 0xc0 => text(in, code & 0x1f)
      case 0xc0 => null
      case 0xc2 => false
      case 0xc3 => true
      case code @ (0xc4 | 0xc5 | 0xc6) => bytes(in, number(in, 1 << code - 0xc4))
      case 0xca => in.getFloat.toDouble
      case 0xcb => in.getDouble
      case code @ (0xcc | 0xcd | 0xce | 0xcf) => number(in, 1 << code - 0xcc)
      case 0xd0 => in.get.toLong
      case 0xd1 => in.getShort.toLong
      case 0xd2 => in.getInt.toLong
      case 0xd3 => in.getLong
      case code @ (0xd9 | 0xda | 0xdb) => text(in, number(in, 1 << code - 0xd9))
      case code @ (0xdc | 0xdd) => list(number(in, 2 << code - 0xdc))
      case code @ (0xde | 0xdf) => map(number(in, 2 << code - 0xde))
      case code => throw new IOException(s"unknown type $code in a frame")
    }
  }

  /** An unsigned number of so many bytes. */
  private def number(in: ByteBuffer, nbytes: Int): Long =
    (0 until nbytes).foldLeft(0L)((found, _) => found << 8 | in.get & 0xff)

  private def bytes(in: ByteBuffer, length: Long): Array[Byte] = {
    if (length > in.remaining) throw new BufferUnderflowException
    val found = new Array[Byte](length.toInt)
    in.get(found)
    found
  }

  private def text(in: ByteBuffer, length: Long): String = new String(bytes(in, length), UTF_8)

  /** Evaluate `item` so many times; the buffer ends first if the length is wrong. */
  private def times[T](length: Long, item: => T): List[T] =
    Iterator.iterate(0L)(_ + 1).takeWhile(_ < length).map(_ => item).toList
}
